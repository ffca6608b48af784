"""Bamboogle and the search sets: values by hand, real episodes over a corpus, a judge that answers, errs and dies."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import real_data
from tests.support.every import every
from tests.support.service import free_port, service
from tests.toolrl.benchmarks.runner.eval_play import category, groups, scores
from toolrl.benchmarks.qa import reward as qa
from toolrl.benchmarks.qa.reward import QaReward, final_answer
from toolrl.benchmarks.qa.search import bamboogle, search
from toolrl.benchmarks.runner.benchmark import BenchmarkContext
from verl.errors import ConfigError, DataError, ServiceDownError
from verl.formats.base import build_tool_call_format
from verl.host.services import check_services
from verl.types import Completion, FinishReason, Message, Outcome, StopReason, Task, ToolCall, Trajectory, Turn
from verl.utils.reward_score.base import build_reward


def episode(text: str, *golds: str) -> Trajectory:
    task = Task("q#0", (Message("system", "Answer."), Message("user", "Who?")), json.dumps(golds), "test")
    turn = Turn((), Completion((), (), FinishReason.STOP, 0), Message("assistant", text))
    return Trajectory(task, 0, (turn,), StopReason.STOP, Outcome.SCORED)


def parts(text: str, *golds: str, reward: QaReward | None = None) -> dict[str, float]:
    of = episode(text, *golds)
    return dict((reward or QaReward()).score(of, of.task, 0).parts)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<answer>a</answer> or <answer> b </answer>", "b"),
        ("<response> it is <answer>b</answer> </response>", "b"),
        ("<think><answer>a</answer></think> c", "c"),
        ("<think>t</think><response> b </response>", "b"),
        ("<response> never closed", "never closed"),
        ("<answer> never closed", "<answer> never closed"),
        (" the whole message\n", "the whole message"),
        ("<answer></answer>", ""),
        ("", ""),
    ],
)
def test_where_the_answer_stands(response: str, answer: str) -> None:
    assert final_answer(response) == answer


@pytest.mark.parametrize(
    ("text", "golds", "exact", "f1", "contains"),
    [
        ("The Titan-IIIE!", ["titan iiie"], 0, 0, 0),  # punctuation goes without a space in its place
        ("the Titan IIIE.", ["Titan IIIE"], 1, 1, 1),
        ("It was James Madison", ["james madison"], 0, 2 * 2 / (4 + 2), 1),
        ("Madison", ["james madison"], 0, 2 * 1 / (1 + 2), 0),
        ("December 1972", ["14 December 1972 UTC", "December 1972"], 1, 1, 1),  # the gold that fits best
        ("I know", ["no"], 0, 0, 0),  # whole terms, not letters
        ("A+", ["A+"], 1, 1, 1),
        ("the", ["The The"], 0, 2 * 1 / (1 + 2), 0),  # what has no normal form is compared as it is
        ("b b", ["b c"], 0, 2 * 1 / (2 + 2), 0),  # a word counts as often as both have it
        ("", ["x"], 0, 0, 0),
        ("...", ["x"], 0, 0, 0),
    ],
)
def test_values_by_hand(text: str, golds: Sequence[str], exact: float, f1: float, contains: float) -> None:
    found = parts(text, *golds)
    assert found == {"exact_match": exact, "f1": pytest.approx(f1), "contains": contains}


@given(st.text(), st.text(min_size=1).filter(str.strip))
def test_values_of_any_text_lie_in_order(text: str, gold: str) -> None:
    found = parts(text, gold)
    assert 0 <= found["exact_match"] <= found["f1"] <= 1 and found["exact_match"] <= found["contains"]


@pytest.mark.parametrize("piece", ["<answer>", "</answer>", "<response>", "a ", "</think>", "<answer>a</answer>", "\n"])
def test_a_megabyte_does_not_hang(piece: str) -> None:
    found = parts(piece * (1_000_000 // len(piece)), "b")
    assert found == {"exact_match": 0, "f1": 0, "contains": 0}


PASSAGES = [
    {"id": "0", "contents": '"Rome"\nRome is the capital of Italy.'},
    {"id": "1", "contents": '"Italy"\nItaly lies in Europe.'},
]


NOWHERE = "http://127.0.0.1:1/retrieve"


def corpus(folder: Path) -> BenchmarkContext:
    (folder / "wiki_passages.jsonl").write_text("\n".join(map(json.dumps, PASSAGES)))
    (folder / "bamboogle.json").write_text(json.dumps([{"Question": "Which capital?", "Answer": "Rome"}]))
    return BenchmarkContext(folder)


def looked_up(tool_call_format: str, times: int, end: str) -> list[str]:
    return [build_tool_call_format(tool_call_format).render([ToolCall("search", {"query": "capital"})])] * times + [end]


@pytest.mark.parametrize("tool_call_format", ["hermes", "toolrl", "search_r1"])
def test_an_episode_searches_and_answers(tmp_path: Path, tool_call_format: str) -> None:
    (one,) = bamboogle(corpus(tmp_path)).categories
    (group,) = groups(one, tool_call_format, lambda _: looked_up(tool_call_format, 2, "<answer>Rome</answer>"))
    (episode,) = group.trajectories
    assert episode.num_tool_calls == 2 and "Rome is the capital" in episode.turns[0].responses[0].content
    assert group.scores[0].total == 1.0


def test_a_server_of_passages_can_be_searched_instead(tmp_path: Path) -> None:
    of, port = corpus(tmp_path), free_port()
    passages = str(tmp_path / "wiki_passages.jsonl")
    command = ("-m", "toolrl.tools.retrieval.server", "--corpus", passages, "--port", str(port))
    with service(*command, url=f"http://127.0.0.1:{port}/health"):
        elsewhere = {"retriever": "http", "urls": f"http://127.0.0.1:{port}/retrieve", "topk": 1}
        benchmark = bamboogle(BenchmarkContext(of.data_dir, search=elsewhere))
        (group,) = groups(benchmark.categories[0], "hermes", lambda _: looked_up("hermes", 1, "<answer>Rome</answer>"))
    (episode,) = group.trajectories
    assert "Rome is the capital" in episode.turns[0].responses[0].content and group.scores[0].total == 1.0
    assert every("7,119" not in note for note in benchmark.notes)


def test_bamboogle_ends_after_three_calls(tmp_path: Path) -> None:
    (one,) = bamboogle(corpus(tmp_path)).categories
    (group,) = groups(one, "hermes", lambda _: looked_up("hermes", 4, "never written"))
    (episode,) = group.trajectories
    assert (len(episode.turns), episode.num_tool_calls, group.scores[0].total) == (4, 3, 0.0)


@pytest.mark.parametrize(
    ("name", "file", "rows"),
    [
        ("bamboogle", ("toolrl", "benchmarks", "bamboogle.json"), 125),
        ("search/hotpotqa_100", ("search", "hotpotqa_100.jsonl"), 100),
        ("search/hotpotqa_dev", ("search", "hotpotqa_dev_closed.jsonl.gz"), 7405),
        ("search/nq_open", ("search", "nq_open_dev.jsonl.gz"), 3610),
    ],
)
def test_gold_answers_are_right_and_silence_is_not(name: str, file: tuple[str, ...], rows: int) -> None:
    folder = real_data(*file).parents[len(file) - 1]
    setting = BenchmarkContext(folder, search={"retriever": "http", "urls": NOWHERE})  # these episodes do not search
    one = category((bamboogle if name == "bamboogle" else search)(setting), name)
    tasks = one.tasks()
    assert len(tasks) == rows
    for task in tasks:
        golds = json.loads(task.answer)
        for gold in golds:
            found = parts(f"<think>t</think> <answer>{gold}</answer>", *golds)
            assert (found["exact_match"], found["f1"], found["contains"]) == (1, pytest.approx(1), 1)
        assert every(part == 0 for part in parts("", *golds).values())
    few = tasks[:3]
    scored = scores(one, "hermes", lambda task: [f"<answer>{json.loads(task.answer)[0]}</answer>"], few)
    assert [score.total for score in scored] == [1.0] * 3
    assert [score.total for score in scores(one, "hermes", lambda _: [""], few)] == [0.0] * 3


@contextmanager
def judge(*verdicts: Any) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An endpoint that answers these one after the other; a number is the status of an error."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            verdict = verdicts[min(len(asked), len(verdicts) - 1)]
            asked.append({"path": self.path, "key": self.headers["Authorization"], **body})
            self.send_response(verdict if isinstance(verdict, int) else 200)
            self.end_headers()
            if not isinstance(verdict, int):
                content = verdict if isinstance(verdict, dict) else {"choices": [{"message": {"content": verdict}}]}
                self.wfile.write(json.dumps(content).encode())

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        server.server_close()


def test_a_judge_decides_the_score(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "k")
    with judge("Yes.", "<think>Yes? No.</think> **no**", 503, "yes") as (url, asked):
        reward = QaReward({"url": url, "model": "m", "key_variable": "JUDGE_KEY"})
        of = episode("<answer>the man from Port Conway</answer>", "James Madison")
        right = reward.score(of, of.task, 0)
        assert (right.total, right.parts["judge"], right.parts["exact_match"]) == (1.0, 1.0, 0.0)
        assert parts("Monroe", "James Madison", reward=reward)["judge"] == 0.0
        assert parts("Madison", "James Madison", reward=reward)["judge"] == 1.0  # asked again after the error
        assert parts("", "James Madison", reward=reward)["judge"] == 0.0  # nothing to ask about
    first = asked[0]
    assert (first["path"], first["key"], first["model"]) == ("/v1/chat/completions", "Bearer k", "m")
    assert first["temperature"] == 0.0 and len(asked) == 4
    prompt = first["messages"][0]["content"]
    assert all(text in prompt for text in ("Who?", "James Madison", "the man from Port Conway"))


@pytest.mark.parametrize(
    "verdict", [500, "I am not sure.", "it is unknown", "<think>Yes, so", None, {"error": "no model"}, {"choices": []}]
)
def test_a_judge_that_fails_leaves_the_answer_unscored(verdict: Any, tmp_path: Path) -> None:
    with judge(verdict) as (url, _):
        of = episode("Monroe", "Madison")
        with pytest.raises(ServiceDownError, match="judge at"):
            QaReward({"url": url, "model": "m"}).score(of, of.task, 0)
        setting = BenchmarkContext(corpus(tmp_path).data_dir, judge={"url": url, "model": "m"})
        (one,) = bamboogle(setting).categories
        (group,) = groups(one, "hermes", lambda _: ["<answer>Paris</answer>"])
        assert one.metric == "judge" and group.scores == () and "judge at" in group.faults[0]


def test_a_missing_judge_leaves_the_answer_unscored() -> None:
    of = episode("Monroe", "Madison")
    with pytest.raises(ServiceDownError, match="ConnectError"):
        QaReward({"url": f"http://127.0.0.1:{free_port()}/v1", "model": "m"}).score(of, of.task, 0)


def test_a_judge_is_tried_at_the_start() -> None:
    def check(url: str) -> None:
        asyncio.run(check_services([build_reward("qa", {"judge": {"url": url, "model": "m"}})]))

    with judge("yes") as (url, asked):
        check(url)
        assert len(asked) == 1
    with (
        judge({"error": "none"}) as (url, _),
        pytest.raises(ServiceDownError, match=r"returned no completion: .*none.*correct url, model"),
    ):
        check(url)
    with pytest.raises(ServiceDownError, match=r"judge at .*ConnectError.*Start it"):
        check(f"http://127.0.0.1:{free_port()}/v1")
    asyncio.run(check_services([build_reward("qa", {})]))  # there is no judge to ask


def test_a_judge_that_hangs_is_left_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qa, "_DEADLINE_S", 0.5)
    of = episode("Monroe", "Madison")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        reward = QaReward({"url": f"http://127.0.0.1:{silent.getsockname()[1]}/v1", "model": "m"})
        with pytest.raises(ServiceDownError, match=r"did not answer within 0.5 s"):
            reward.score(of, of.task, 0)
        silent.setblocking(False)
        silent.accept()
        with pytest.raises(BlockingIOError):  # asked once: a second attempt would have no time left
            silent.accept()


@pytest.mark.parametrize("options", [{"url": "http://h/v1"}, {"model": "m"}, {"url": "u", "model": "m", "key": "k"}])
def test_a_judge_has_url_and_model(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="expected url"):
        build_reward("qa", {"judge": options})


def test_missing_or_wrong_data_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"wiki_passages.jsonl.gz .*retriever: http"):
        bamboogle(BenchmarkContext(tmp_path))
    elsewhere = BenchmarkContext(tmp_path, search={"retriever": "http", "urls": NOWHERE, "topk": 5})
    with pytest.raises(ConfigError, match=r"bamboogle.json .* ToolRL's repository"):
        bamboogle(elsewhere).categories[0].tasks()
    (tmp_path / "bamboogle.json").write_text('[{"Question": "q", "Answer": "a"}, {"Question": "q", "Answer": 7}]')
    with pytest.raises(DataError, match=r"bamboogle.json, row 1, field 'Answer'"):
        bamboogle(elsewhere).categories[0].tasks()
    (tmp_path / "hotpotqa_100.jsonl").write_text('{"question": "q", "golden_answers": [" "]}')
    with pytest.raises(DataError, match=r"hotpotqa_100.jsonl#0, field 'golden_answers': is \["):
        search(elsewhere).categories[0].tasks()
    (tmp_path / "nq_open_dev.jsonl").write_text('{"question": "q", "golden_answers": ["a"]}\n{"question": "q"}')
    with pytest.raises(DataError, match=r"row 1, field 'golden_answers': is missing"):
        category(search(elsewhere), "search/nq_open").tasks()
