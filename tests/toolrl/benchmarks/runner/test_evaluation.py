"""Evaluation: scores by hand, answers that are kept, and the command from outside."""

from __future__ import annotations

import asyncio
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from tests.conftest import ROOT
from tests.support.tiny import MINI
from tests.toolrl.benchmarks.runner.eval_play import foretold, scores
from toolrl.benchmarks.runner.benchmark import Aggregate, Benchmark, BenchmarkContext, Category, EpisodeConfig
from toolrl.benchmarks.runner.evaluate import caveats, check_faults
from toolrl.benchmarks.runner.files import find_file, numbered_rows
from toolrl.benchmarks.runner.handlers import env_of, tool_call_format_of
from toolrl.benchmarks.runner.records import Records, digest_of
from toolrl.benchmarks.runner.registry import build_benchmarks, check_benchmarks
from toolrl.benchmarks.runner.report import Evaluated, comparison_of, result_of
from toolrl.benchmarks.runner.runner import Runner
from toolrl.benchmarks.runner.stats import aggregate, estimate, wilson
from toolrl.benchmarks.runner.tables import comparison_grid, result_grid
from toolrl.check.preflight.scripted_engine import ScriptedEngine
from toolrl.commands import EVAL
from verl.build.env import single_turn_runner
from verl.build.scorer import scoring_limits
from verl.chat.template import ChatTemplate
from verl.config.load import load_config
from verl.config.schema import EnvConfig
from verl.episodes.group import GroupRollout
from verl.episodes.manager import RewardFaultError
from verl.errors import ConfigError, DataError
from verl.formats.base import build_tool_call_format
from verl.rollout.engine import Sampling
from verl.scoring.pool import DirectScorer
from verl.scoring.process import ScoringLimits
from verl.scoring.rewards import Rewards
from verl.trainer.main_eval import main
from verl.types import Message, Score, Task, ToolCall, Trajectory

SETTINGS = {
    "rollout.n": 1,
    "eval.handler": "toolrl",
    "data.max_prompt_length": 512,
    "data.max_response_length": 64,
}


class Exact:
    """A reward: 1 for the gold answer; a response of "broken" makes it fail."""

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        if trajectory.response == "broken":
            raise RuntimeError("the judge is away")
        right = float(trajectory.response == task.answer)
        return Score(right, {"right": right, "long": float(len(trajectory.response))})


@pytest.fixture(scope="module")
def tool_call_format() -> ChatTemplate:
    return ChatTemplate(AutoTokenizer.from_pretrained(MINI / "tokenizer"))


def tasks(count: int) -> list[Task]:
    return [Task(f"t#{number}", (Message("user", f"write {number}"),), str(number), "test") for number in range(count)]


def category(count: int = 8, metric: str = "right") -> Category:
    return Category("toy/all", lambda: tasks(count), EpisodeConfig("exact", uses_tools=False), metric)


class Counting:
    """A model that answers a prompt by `response(number in the prompt, rollout)` and counts how often it is asked."""

    def __init__(self, tool_call_format: ChatTemplate, response: Callable[[int, int], str]) -> None:
        self.asked: list[int] = []
        self._format, self._response = tool_call_format, response
        self.engine = ScriptedEngine(self._script)

    def _script(self, prompt_ids: Sequence[int], rollout: int) -> Sequence[int]:
        text = self._format.tokenizer.decode(prompt_ids)
        number = int(text.split("write ")[1].split("<")[0].split()[0])
        self.asked.append(number)
        ids: list[int] = self._format.tokenizer(self._response(number, rollout))["input_ids"]
        return [*ids, self._format.end_token_id]


def run(
    tool_call_format: ChatTemplate, model: Counting, folder: Path, what: Category, n: int = 1, limit: int = 64
) -> tuple[list[str], Records]:
    records = Records(folder, what, n)
    sampling = Sampling(16, 0.0, n, tool_call_format.stop_token_ids)
    reward = Exact()
    rollout = GroupRollout(
        model.engine, DirectScorer(reward), sampling, single_turn_runner(tool_call_format, sampling.max_tokens)
    )
    runner = Runner(rollout, tool_call_format.task_prompt_ids, Rewards(reward), limit, n)
    faults = asyncio.run(runner.run(what, records.missing(what.tasks()), records, lambda: None))
    return faults, records


def test_mean_and_interval_of_known_values() -> None:
    score = estimate("a", [1.0, 0.0, 1.0, 1.0], 4000)
    low, high = score.interval
    assert score.mean == 0.75 and score.num_rows == 4
    # of four tasks, three right: P(no draw right) = 1/256 and P(one right) = 12/256, so that 2.5 % lie at 0.25
    assert (low, high) == (0.25, 1.0)
    assert estimate("b", [0.5, 0.5], 10).interval == (0.5, 0.5)


def test_wilsons_interval_of_a_share() -> None:
    low, high = wilson(0.0, 100)
    assert low == 0.0 and high == pytest.approx(1.96**2 / (100 + 1.96**2))
    assert wilson(0.25, 4) == pytest.approx((0.0456, 0.6994), abs=1e-4)  # worked by hand
    assert wilson(0.9, 50) == pytest.approx(tuple(1 - bound for bound in reversed(wilson(0.1, 50))))


def test_the_same_tasks_give_the_same_interval() -> None:
    values = [float(number % 3 == 0) for number in range(50)]
    assert estimate("a", values, 500).interval == estimate("a", values, 500).interval


def test_aggregates_over_members_and_rows() -> None:
    scores = {"x": estimate("x", [1.0, 1.0, 1.0], 10), "y": estimate("y", [0.0], 10)}
    made = aggregate(
        [
            Aggregate("mean", ("x", "y")),
            Aggregate("rows", ("x", "y"), over="rows"),
            Aggregate("of those", ("mean", "rows")),
            Aggregate("not run", ("x", "z")),
        ],
        scores,
    )
    assert {name: score.mean for name, score in made.items()} == {"mean": 0.5, "rows": 0.75, "of those": 0.625}
    assert made["rows"].interval == (0.75, 0.75) and made["rows"].num_rows == 4


def test_a_task_is_asked_once_however_wrong(tool_call_format: ChatTemplate, tmp_path: Path) -> None:
    model = Counting(tool_call_format, lambda number, _: str(number) if number % 2 else "no")
    faults, _ = run(tool_call_format, model, tmp_path, category())
    assert faults == [] and sorted(model.asked) == list(range(8))
    again = Counting(tool_call_format, lambda number, _: str(number))
    run(tool_call_format, again, tmp_path, category())
    assert again.asked == []
    scores = [rows[0]["metric_value"] for rows in Records(tmp_path, category(), 1).of(tasks(8))]
    assert scores == [0.0, 1.0] * 4


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (
            lambda path: (path.parent.mkdir(), path.symlink_to("/dev/full")),
            r"^no space left on \S+all.jsonl \(No space",
        ),
        (lambda path: path.parent.write_text(""), r"all.jsonl: cannot be written \(File exists\)"),
    ],
)
def test_answers_that_cannot_be_kept_are_one_error(make: Callable[[Path], Any], problem: str, tmp_path: Path) -> None:
    records = Records(tmp_path / "answers", category(), 1)
    make(records.path)
    with pytest.raises(DataError, match=f"{problem}.*finished tasks are kept"):
        records.add_unasked(tasks(1)[0], "too long")


def test_a_changed_task_or_rule_is_asked_again(tool_call_format: ChatTemplate, tmp_path: Path) -> None:
    run(tool_call_format, Counting(tool_call_format, lambda number, _: "no"), tmp_path, category())
    records = Records(tmp_path, category(), 1)
    first, *rest = tasks(8)
    assert records.missing([replace(first, answer="other"), *rest]) == [replace(first, answer="other")]
    assert len(Records(tmp_path, category(metric="total"), 1).missing(tasks(8))) == 8


def test_unjudged_answers_are_missing_and_judged_again(tool_call_format: ChatTemplate, tmp_path: Path) -> None:
    faults, _ = run(
        tool_call_format,
        Counting(tool_call_format, lambda number, _: "broken" if number == 3 else "no"),
        tmp_path,
        category(),
    )
    assert len(faults) == 1 and "the judge is away" in faults[0]
    model = Counting(tool_call_format, lambda number, _: str(number))
    faults, records = run(tool_call_format, model, tmp_path, category())
    assert faults == [] and model.asked == [3]
    benchmark = Benchmark("toy", (category(),))
    done = Evaluated("m", tmp_path, SETTINGS, {"toy/all": records.of(tasks(8))[:6]})
    assert result_of(benchmark, [(category(), tasks(8))], done, 10)["categories"]["toy/all"]["missing"] == 2


def test_too_many_faults_stop_the_remaining_episodes(
    tool_call_format: ChatTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolrl.benchmarks.runner.runner._MAX_CONCURRENT", 1)
    model = Counting(tool_call_format, lambda number, _: "broken" if number % 2 else "no")
    records, reward = Records(tmp_path, category(64), 1), Exact()
    rollout = GroupRollout(
        model.engine,
        DirectScorer(reward),
        Sampling(16, 0.0, 1, tool_call_format.stop_token_ids),
        single_turn_runner(tool_call_format, 16),
    )
    runner = Runner(rollout, tool_call_format.task_prompt_ids, Rewards(reward), 64, max_faults=3)
    faults = asyncio.run(runner.run(category(64), tasks(64), records, lambda: None))
    assert len(faults) == 4 and 8 <= len(model.asked) < 12  # what has started may end
    assert 50 < len(records.missing(tasks(64))) <= 60  # what was answered is kept


@pytest.mark.parametrize("torn", [1, 2, 40])
def test_a_torn_file_goes_on_where_it_was_whole(tool_call_format: ChatTemplate, tmp_path: Path, torn: int) -> None:
    """The last task loses part of a line, a whole line, or more: it is asked again as a whole, and no other."""
    run(
        tool_call_format,
        Counting(tool_call_format, lambda number, rollout: str(number + rollout)),
        tmp_path,
        category(),
        n=2,
    )
    path = tmp_path / "toy-all.jsonl"
    text = path.read_bytes()
    last = json.loads(text.splitlines()[-1])["task_id"]
    path.write_bytes(text[: -1 - torn] if torn > 1 else text[: text.rstrip(b"\n").rfind(b"\n") + 1])
    model = Counting(tool_call_format, lambda number, rollout: str(number + rollout))
    run(tool_call_format, model, tmp_path, category(), n=2)
    assert [f"t#{number}" for number in model.asked] == [last] * 2
    assert {row["task_id"] for row in map(json.loads, path.read_text().splitlines())} == {f"t#{n}" for n in range(8)}
    assert len(path.read_text().splitlines()) == 16


def test_a_foreign_file_is_named(tool_call_format: ChatTemplate, tmp_path: Path) -> None:
    for line in ('{"other": 1}', '{"digest": "d"}', "[]"):
        (tmp_path / "toy-all.jsonl").write_text(f"{line}\n")
        with pytest.raises(DataError, match=r"toy-all\.jsonl: is not a file of evaluation records"):
            Records(tmp_path, category(), 1)


def test_a_prompt_without_room_counts_as_wrong_and_is_reported(tool_call_format: ChatTemplate, tmp_path: Path) -> None:
    model = Counting(tool_call_format, lambda number, _: str(number))
    _, records = run(tool_call_format, model, tmp_path, category(), limit=1)
    assert model.asked == []
    benchmark = Benchmark("toy", (category(),))
    done = Evaluated("m", tmp_path, SETTINGS, {"toy/all": records.of(tasks(8))})
    found = result_of(benchmark, [(category(), tasks(8))], done, 10)["categories"]["toy/all"]
    assert (found["score"]["mean"], found["not_asked"], found["cut_off"], found["missing"]) == (0.0, 8, 1.0, 0)


def test_several_rollouts_make_mean_pass_at_n_and_pass_hat_n(tool_call_format: ChatTemplate, tmp_path: Path) -> None:
    """Of task k the first k of four rollouts are right, k = 0..4."""
    model = Counting(tool_call_format, lambda number, rollout: str(number) if rollout < number else "no")
    _, records = run(tool_call_format, model, tmp_path, category(5), n=4)
    benchmark = Benchmark("toy", (category(5),), (Aggregate("overall", ("toy/all",)),), ("a note",))
    done = Evaluated("m", tmp_path, {**SETTINGS, "rollout.n": 4}, {"toy/all": records.of(tasks(5))})
    result = result_of(benchmark, [(category(5), tasks(5))], done, 100)
    found = result["categories"]["toy/all"]
    assert found["score"]["mean"] == pytest.approx((0 + 1 + 2 + 3 + 4) / 20)
    assert (found["pass@n"], found["pass^n"]) == (0.8, 0.2)
    assert found["pass^k"] == pytest.approx({"1": 0.5, "2": (1 + 3 + 6) / 6 / 5, "3": (1 + 4) / 4 / 5, "4": 0.2})
    assert result["aggregates"]["overall"]["formula"] == "overall = mean over members of toy/all"
    shown = result_grid(result)
    assert "50.0" in shown.rows[0] and "80.0" in shown.rows[0] and "| overall | 5 | 50.0 |" in shown.as_markdown()


def test_the_majority_is_the_most_frequent_answer_of_several_rollouts(
    tool_call_format: ChatTemplate, tmp_path: Path
) -> None:
    """Answers of three rollouts; the task's number is right: two of three, one of three, a tie that comes first, a tie
    that comes later, nothing that counts."""
    answers = (("0", "7", "0"), ("7", "1", "7"), ("2", "7", "none"), ("7", "3", "none"), ("none",) * 3)
    model = Counting(tool_call_format, lambda number, rollout: answers[number][rollout])
    voting = replace(category(5), answer_of=lambda text: None if "none" in text else text)
    _, records = run(tool_call_format, model, tmp_path, voting, n=3)
    done = Evaluated("m", tmp_path, {**SETTINGS, "rollout.n": 3}, {"toy/all": records.of(tasks(5))})
    result = result_of(Benchmark("toy", (voting,)), [(voting, tasks(5))], done, 100)
    assert result["categories"]["toy/all"]["maj@n"] == 2 / 5
    assert "maj@n" in result_grid(result).columns and "40.0" in result_grid(result).rows[0]


def test_a_model_against_itself_differs_in_nothing(tool_call_format: ChatTemplate, tmp_path: Path) -> None:
    _, records = run(
        tool_call_format, Counting(tool_call_format, lambda number, _: str(number % 3)), tmp_path, category()
    )
    benchmark = Benchmark("toy", (category(),), (Aggregate("overall", ("toy/all",)),))
    done = Evaluated("m", tmp_path, SETTINGS, {"toy/all": records.of(tasks(8))})
    found = comparison_of(benchmark, done, done, 200)
    for name in ("toy/all", "overall"):
        assert found["scores"][name]["difference"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert comparison_grid(found).rows[0][4:] == ("+0.0", "+0.0 to +0.0")
    assert found["notes"] == []
    smaller = replace(done, settings={**SETTINGS, "data.max_prompt_length": 256})
    (note,) = comparison_of(benchmark, done, smaller, 10)["notes"]
    assert note.startswith("data.max_prompt_length is 512, the base's 256")


def test_a_comparison_reports_handler_formula_and_notes(tool_call_format: ChatTemplate, tmp_path: Path) -> None:
    """Handler, formula and warnings stand beside differences as beside a model's own scores."""
    _, records = run(tool_call_format, Counting(tool_call_format, lambda number, _: "no"), tmp_path, category())
    uses_tools = replace(category(), episode=EpisodeConfig("exact", {"strict": True}, tools=("python",)))
    aggregates = Aggregate("overall", ("toy/all",)), Aggregate("more", ("x",))
    benchmark = Benchmark("toy", (uses_tools,), aggregates, ("a part",))
    done = Evaluated("m", tmp_path, SETTINGS, {"toy/all": records.of(tasks(8))})
    compared = comparison_of(benchmark, done, done, 10)
    assert comparison_grid(compared).title == "toy: m against m, handler toolrl"
    assert compared["notes"] == ["a part"]
    assert compared["aggregates"] == {"overall": {"formula": "overall = mean over members of toy/all"}}
    plain = comparison_of(Benchmark("toy", (category(),)), done, done, 10)
    assert comparison_grid(plain).title == "toy: m against m, prompts as they are"
    episode = result_of(benchmark, [(uses_tools, tasks(8))], done, 10)["categories"]["toy/all"]["episode"]
    assert (episode["reward"], episode["reward_options"], episode["tools"]) == ("exact", {"strict": True}, ("python",))


def test_the_input_of_the_model_is_kept_verbatim(tool_call_format: ChatTemplate, tmp_path: Path) -> None:
    records = Records(tmp_path, category(1), 1, tool_call_format.tokenizer.decode)
    rollout = GroupRollout(
        Counting(tool_call_format, lambda number, _: "no").engine,
        DirectScorer(Exact()),
        Sampling(16, 0.0),
        single_turn_runner(tool_call_format, 16),
    )
    asyncio.run(
        Runner(rollout, tool_call_format.task_prompt_ids, Rewards(Exact()), 64).run(
            category(1), tasks(1), records, lambda: None
        )
    )
    (row,) = map(json.loads, records.path.read_text().splitlines())
    assert (
        row["shown"] == [tool_call_format.tokenizer.decode(tool_call_format.task_prompt_ids(tasks(1)[0]))]
        and "write 0" in row["shown"][0]
    )


def test_a_bad_row_is_named_with_a_hint_that_applies(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": 3}\n')
    (benchmark,) = build_benchmarks([str(path)], BenchmarkContext(tmp_path))
    with pytest.raises(DataError, match=r"mine.jsonl, row 0, field 'prompt': .* Correct the row: no row is skipped"):
        benchmark.categories[0].tasks()


@pytest.mark.parametrize("handler", ["toolrl", "hermes"])
def test_calls_of_openai_rows_are_read_in_the_handler_s_format(handler: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    call = {"id": "c", "type": "function", "function": {"name": "rain", "arguments": '{"city": "Oslo"}'}}
    tool = {"type": "function", "function": {"name": "rain", "parameters": {"properties": {"city": {}}}}}
    gold = {"role": "assistant", "content": None, "tool_calls": [call]}
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "Rain?"}, gold], "tools": [tool]}))
    (benchmark,) = build_benchmarks([str(path)], BenchmarkContext(tmp_path, reward="calls"))
    written = build_tool_call_format(handler).render([ToolCall("rain", {"city": "Oslo"})])
    right, wrong = (
        scores(benchmark.categories[0], handler, lambda _, text=text: [f"<think> a </think>\n{text}"])[0]
        for text in (written, written.replace("Oslo", "Rome"))
    )
    assert right.total == 4.0 > wrong.total and foretold(
        benchmark.categories[0], handler, benchmark.categories[0].tasks()
    )


def test_a_data_file_is_scored_by_the_reward_that_is_asked_for() -> None:
    (rows,) = build_benchmarks(["x.parquet"], BenchmarkContext(Path("nowhere"), reward="math"))
    assert rows.categories[0].episode.reward == "math" and rows.categories[0].metric in ("exact", "total")
    (own,) = build_benchmarks(["x.parquet"], BenchmarkContext(Path("nowhere"), reward=f"{__name__}:Exact"))
    assert own.categories[0].metric == "total"
    with pytest.raises(ConfigError, match="unknown reward 'mth'"):
        build_benchmarks(["x.parquet"], BenchmarkContext(Path("nowhere"), reward="mth"))


def test_a_data_file_is_run_in_the_environment_of_training(tmp_path: Path) -> None:
    """Settings and rows as they are there; other benchmarks have environments of their own."""
    own = EnvConfig(name="shop", tool_call_format="hermes", max_turns=3, turn_timeout_s=7.0, on_parse_error="terminate")
    path = tmp_path / "rows.jsonl"
    row = {"prompt": [{"role": "user", "content": "Buy"}], "reward_model": {"ground_truth": "a"}, "data_source": "shop"}
    path.write_text(json.dumps({**row, "env": "shop"}))
    context = BenchmarkContext(tmp_path, reward="env", env=own)
    (benchmark,) = build_benchmarks([str(path)], context)
    (category,) = benchmark.categories
    assert env_of(category.episode, "hermes") == own and category.metric == "total"
    assert [task.env for task in category.tasks()] == ["shop"] and "in the environment shop" in benchmark.notes[0]
    other = replace(category, episode=replace(category.episode, own_env=replace(own, max_turns=4)))
    assert digest_of(category, category.tasks()[0]) != digest_of(other, category.tasks()[0])
    with pytest.raises(ConfigError, match=r"bfcl has an environment of its own; env\.name=shop suits data files"):
        build_benchmarks(["bfcl"], context)
    (plain,) = build_benchmarks([str(path)], replace(context, env=None, reward="rlla"))
    with pytest.raises(DataError, match="'shop' is not supported here"):
        plain.categories[0].tasks()


def test_differences_are_paired_by_task(tool_call_format: ChatTemplate, tmp_path: Path) -> None:
    """The base has answered half of the tasks; only those count."""
    _, better = run(
        tool_call_format, Counting(tool_call_format, lambda number, _: str(number)), tmp_path / "a", category()
    )
    _, worse = run(tool_call_format, Counting(tool_call_format, lambda number, _: "no"), tmp_path / "b", category(4))
    benchmark = Benchmark("toy", (category(),))
    ours, theirs = (
        Evaluated(name, tmp_path, SETTINGS, {"toy/all": each.of(tasks(8))})
        for name, each in (("a", better), ("b", worse))
    )
    found = comparison_of(benchmark, ours, theirs, 50)["scores"]["toy/all"]
    assert (found["rows"], found["difference"]["mean"], found["difference"]["low"]) == (4, 1.0, 1.0)


def test_columns_of_a_comparison_are_of_the_same_tasks(tool_call_format: ChatTemplate, tmp_path: Path) -> None:
    """The model has all of eight tasks, the second half wrong; the base the first four, all right: no difference."""
    right = Counting(tool_call_format, lambda number, _: str(number) if number < 4 else "no")
    _, records = run(tool_call_format, right, tmp_path, category())
    ours, theirs = (Evaluated("m", tmp_path, SETTINGS, {"toy/all": records.of(tasks(count))}) for count in (8, 4))
    found = comparison_of(Benchmark("toy", (category(),)), ours, theirs, 50)["scores"]["toy/all"]
    assert [found[name]["mean"] for name in ("model", "base", "difference")] == [1.0, 1.0, 0.0]


def test_a_category_without_tasks_is_an_error() -> None:
    assert [task.id for task in category(8).first(2)] == ["t#0", "t#1"] and len(category(8).first(None)) == 8
    with pytest.raises(DataError, match="toy/all has no tasks"):
        category(0).first(5)


def test_equal_tasks_are_asked_once(tool_call_format: ChatTemplate, tmp_path: Path) -> None:
    twice = replace(category(), tasks=lambda: [*tasks(2), *tasks(2)])
    model = Counting(tool_call_format, lambda number, _: "no")
    _, records = run(tool_call_format, model, tmp_path, twice)
    assert sorted(model.asked) == [0, 1] and len(records.of(twice.tasks())) == 4
    path = tmp_path / "toy-all.jsonl"
    path.write_text(path.read_text() * 2)  # as two runs at once would have left it
    assert Records(tmp_path, twice, 1).missing(twice.tasks()) == []


def test_a_full_disk_leaves_lines_that_are_whole(tool_call_format: ChatTemplate, tmp_path: Path) -> None:
    """What is written after the task that no longer fitted must not go on in its torn line."""
    run(tool_call_format, Counting(tool_call_format, lambda number, _: "no"), tmp_path, category(4))
    path, limits = tmp_path / "toy-all.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 50, limits[1]))
    try:
        with pytest.raises(DataError, match="Free some space"):
            run(tool_call_format, Counting(tool_call_format, lambda number, _: "no"), tmp_path, category(5))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    model = Counting(tool_call_format, lambda number, _: "no")
    assert len([json.loads(line) for line in _lines(path)]) == 4
    run(tool_call_format, model, tmp_path, category(6))
    assert sorted(model.asked) == [4, 5]


def test_faults_are_counted_by_task_and_against_all_of_a_category(
    tool_call_format: ChatTemplate, tmp_path: Path
) -> None:
    """One of eight tasks fails with both of its rollouts, and does so again when the evaluation goes on."""
    model = Counting(tool_call_format, lambda number, _: "broken" if number == 3 else "no")
    for _ in range(2):
        faults, _ = run(tool_call_format, model, tmp_path, category(), n=2)
        assert len(faults) == 1
        check_faults("toy/all", faults, 8, 1 / 8, Console(file=io.StringIO()))
    with pytest.raises(RewardFaultError, match="1 of 8 tasks failed"):
        check_faults("toy/all", faults, 8, 0.1, Console(file=io.StringIO()))


def test_a_folder_goes_on_after_a_category_with_a_few_faults(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stays missing is few of all the tasks, though it is all that is left to be asked."""

    async def fails_on_one(self: Runner, what: Category, of: Sequence[Task], records: Records, done: Any) -> list[str]:
        for task in of:
            if not task.id.endswith("#0"):
                records.add_unasked(task, "is not asked here")
        return [f"{task.id}: the judge is away" for task in of if task.id.endswith("#0")]

    monkeypatch.setattr(Runner, "run", fails_on_one)
    for _ in range(2):
        assert main(overrides_for(model, tmp_path, "reward.max_fault_share=0.2")) == 0
        assert result(tmp_path)["categories"]["test.parquet"]["missing"] == 1


@pytest.mark.parametrize("policy", ["policy", "infrastructure"])
def test_the_limits_of_a_reward_can_be_set(
    policy: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = tmp_path / "slow.py"
    reward.write_text(
        "import time\n\ndef judge(response, answer):\n    time.sleep(600 if response else 0)\n    return -1\n"
    )
    limits = ("reward.timeout_s=3", "reward.memory_mib=null", f"reward.fault_policy={policy}")
    given = overrides_for(
        model, tmp_path, f"reward.name={reward}:judge", *limits, "eval.limit=1", "reward.max_fault_share=1"
    )
    assert main(given) == 0
    (settings,) = tmp_path.glob("*/settings.json")
    recorded = json.loads(settings.read_text())
    assert (recorded["reward.timeout_s"], recorded["reward.memory_mib"], recorded["reward.fault_policy"]) == (
        3.0,
        None,
        policy,
    )
    rows = [row for path in tmp_path.glob("*/answers/*.jsonl") for row in _lines(path)]
    exceeded = "the reward took longer than 3 s (reward.timeout_s)"
    assert [json.loads(row)["exceeded"] for row in rows] == ([exceeded] if policy == "policy" else [])
    assert ("not answered, skipped" in capsys.readouterr().out) == (policy == "infrastructure")


def test_the_limits_of_a_reward_are_its_settings() -> None:
    overrides = ["reward.timeout_s=7", "reward.memory_mib=8192", "reward.fault_policy=infrastructure"]
    commands = ([], [*overrides, "trainer.health_timeout_s=9"])
    made = [scoring_limits(load_config(given, EVAL)) for given in commands]
    assert made == [ScoringLimits(120.0, 4096, "policy"), ScoringLimits(7.0, 8192, "infrastructure", 9.0)]


@pytest.mark.parametrize(
    ("key", "value"), [("timeout_s", 0.0), ("memory_mib", 1), ("fault_policy", "none"), ("num_workers", 0)]
)
def test_invalid_limits_of_a_reward_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"reward.{key} must be"):
        load_config([f"reward.{key}={value}"], EVAL)


def test_benchmarks_by_name_category_and_file() -> None:
    setting = BenchmarkContext(Path("nowhere"))
    (rows,) = build_benchmarks(["some/where/test.parquet"], setting)
    assert rows.name == "test.parquet" and rows.categories[0].metric == "exact"
    with pytest.raises(ConfigError, match="unknown benchmark 'mth'; did you mean 'math'"):
        check_benchmarks(["math/gsm8k", "mth"])
    with pytest.raises(ConfigError, match=r"duplicates: a\.parquet, a\.parquet"):
        check_benchmarks(["a.parquet", "a.parquet"])
    with pytest.raises(ConfigError, match="math has no category 'math/gsm'; did you mean 'math/gsm8k'"):
        build_benchmarks(["math/gsm"], setting)
    with pytest.raises(ConfigError, match=r"have the name 'x\.parquet'"):  # their reports would be one file
        build_benchmarks(["some/where/x.parquet", "x.parquet"], setting)
    both = build_benchmarks(["math/gsm8k", "some/where/math.parquet"], setting)
    assert [benchmark.name for benchmark in both] == ["math", "math.parquet"]
    for name in ("bfcl", "api_bank", "tau2"):
        with pytest.raises(ConfigError, match=f"{name}: the tool-call format 'search_r1' supports a single tool"):
            build_benchmarks([name], replace(setting, tool_call_format="search_r1"))
    (math,) = build_benchmarks(["math/gsm8k_python", "math/gsm8k"], setting)
    assert [category.name for category in math.categories] == ["math/gsm8k_python", "math/gsm8k"]


def test_own_benchmarks_by_file_and_category(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from tests.toolrl.benchmarks.runner.test_online_eval import sums\n")
    own, setting = f"{tmp_path}/mine.py:sums", BenchmarkContext(Path("nowhere"))
    check_benchmarks([own, f"{own}/plain"])
    (whole,) = build_benchmarks([own], setting)
    assert [each.name for each in whole.categories] == ["sums/plain", "sums/handled"]
    (part,) = build_benchmarks([f"{own}/handled"], setting)
    assert [each.name for each in part.categories] == ["sums/handled"]
    with pytest.raises(ConfigError, match="sums has no category 'sums/plan'; did you mean 'sums/plain'"):
        build_benchmarks([f"{own}/plan"], setting)


def test_handlers() -> None:
    template = "{% if tools %}.. <tool_call> .."
    assert tool_call_format_of("native", template) == "hermes" and tool_call_format_of("tool_n1", "") == "tool_n1"
    with pytest.raises(ConfigError, match="has no known tool format"):
        tool_call_format_of("native", "{{ messages }}")
    with pytest.raises(ConfigError, match="unknown handler 'toolr'; did you mean 'toolrl'"):
        tool_call_format_of("toolr", template)
    episode = EpisodeConfig("env", env="shop", max_turns=5, feedback_on_parse_error=False)
    env = env_of(episode, "hermes")
    assert (env.name, env.tool_call_format, env.max_turns, env.on_parse_error) == ("shop", "hermes", 5, "terminate")
    assert env_of(replace(episode, uses_tools=False), "hermes").tool_call_format is None


def test_files_are_found_below_the_folder_and_rows_are_checked(tmp_path: Path) -> None:
    (tmp_path / "math").mkdir()
    path = tmp_path / "math" / "aime.jsonl"
    path.write_text('{"id": "a", "problem": "p"}\n{"id": "b", "problem": 3}\nnot json\n')
    assert find_file(tmp_path, ["aime24.jsonl", "aime.jsonl"], "get it") == path
    with pytest.raises(ConfigError, match=r"b.json is not in .* \(eval\.data_dir\) or below it; get it there"):
        find_file(tmp_path, ["b.json"], "get it there")
    rows = numbered_rows(path, {"id": str, "problem": str})
    assert next(rows) == ("aime.jsonl#0", {"id": "a", "problem": "p"})
    with pytest.raises(DataError, match=r"aime\.jsonl, row 1, field 'problem': is of type int; expected .* str"):
        next(rows)
    path.write_text("\n")
    with pytest.raises(DataError, match=r"aime\.jsonl: has no rows"):
        list(numbered_rows(path, {"id": str}))


def overrides_for(model: Path, out: Path, *more: str) -> list[str]:
    return [
        f"model.path={model}",
        f"eval.benchmarks=[{MINI / 'test.parquet'}]",
        "rollout.name=hf",
        "model.compute_dtype=float32",
        "trainer.device=cpu",
        "eval.limit=6",
        "data.max_prompt_length=512",
        "data.max_response_length=24",
        f"eval.output={out}",
        *more,
    ]


def result(out: Path) -> Any:
    (path,) = list(out.glob("*/test.parquet.json"))
    return json.loads(path.read_text())


@pytest.mark.long
def test_a_killed_evaluation_goes_on_to_the_same_result(model: Path, tmp_path: Path) -> None:
    assert main(overrides_for(model, tmp_path / "whole")) == 0
    slowly = overrides_for(model, tmp_path / "killed", "rollout.max_num_seqs=1")
    command = [sys.executable, "-m", "verl.trainer.main_eval", *slowly]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        _wait(lambda: any(_lines(path) for path in (tmp_path / "killed").glob("*/answers/*.jsonl")), process)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    (answers,) = (tmp_path / "killed").glob("*/answers/*.jsonl")
    before = _lines(answers)
    assert len(before) > 0
    assert main(overrides_for(model, tmp_path / "killed")) == 0
    assert _lines(answers)[: len(before) - 1] == before[:-1]  # nothing was asked a second time
    assert result(tmp_path / "killed") == result(tmp_path / "whole")


@pytest.mark.long
def test_an_interrupt_ends_quietly_with_the_way_on(model: Path, tmp_path: Path) -> None:
    heeding = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    command = "from verl.trainer.main_eval import main\nif __name__ == '__main__': sys.exit(main(sys.argv[1:]))"
    (tmp_path / "run.py").write_text(heeding + command)  # a file, since scorers are started from it
    overrides = overrides_for(
        model, tmp_path / "out", "eval.limit=null", "data.max_response_length=200", "rollout.max_num_seqs=1"
    )
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "run.py"), *overrides],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    _wait(lambda: any(_lines(path) for path in (tmp_path / "out").glob("*/answers/*.jsonl")), process)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "an evaluation from its answers" in " ".join(output.split())
    assert "Traceback" not in output and "ERROR" not in output


def test_a_second_run_starts_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(overrides_for(model, tmp_path, f"eval.compare={model}")) == 0
    first = result(tmp_path)

    def refuse(*_: object) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr("toolrl.benchmarks.runner.evaluate.standalone_engine", refuse)
    assert main(overrides_for(model, tmp_path, f"eval.compare={model}")) == 0
    assert result(tmp_path) == first
    (comparison,) = tmp_path.glob("*/test.parquet-against-*.json")
    (score,) = json.loads(comparison.read_text())["scores"].values()
    assert score["difference"] == {"mean": 0.0, "low": 0.0, "high": 0.0} and score["rows"] == 6


def test_the_base_model_has_its_own_table_and_all_tables_name_the_limit(model: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(model, base)
    assert main(overrides_for(model, tmp_path / "out", f"eval.compare={base}")) == 0
    ours, theirs = (next((tmp_path / "out").glob(f"{name}-*/test.parquet.json")) for name in ("tiny", "base"))
    of_base = json.loads(theirs.read_text())
    assert of_base["model"] == str(base) and of_base["categories"] == json.loads(ours.read_text())["categories"]
    (comparison,) = ours.parent.glob("test.parquet-against-base-*.json")
    for found in (of_base, json.loads(comparison.read_text())):
        assert found["notes"][0] == "eval.limit=6: at most the first 6 rows per category"


def test_unrepeatable_sampling_is_a_caveat() -> None:
    sampled = ["rollout.temperature=1.0", "rollout.n=2", "trainer.device=cpu"]
    (caveat,) = caveats(load_config(sampled, EVAL))
    assert "ignores sampling seeds" in caveat
    assert caveats(load_config([*sampled, "rollout.name=hf"], EVAL)) == ()
    assert caveats(load_config(["trainer.device=cpu"], EVAL)) == ()


@pytest.mark.long
def test_settings_and_weights_are_part_of_the_result(model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(model, tmp_path / "models" / "tiny")
    assert main(overrides_for(model, tmp_path)) == 0
    settings = result(tmp_path)["settings"]
    assert (
        settings["rollout.name"] == "hf" and settings["rollout.temperature"] == 0.0 and "torch" in settings["versions"]
    )
    assert len(settings["chat_template_sha256"]) == 64 and "model.safetensors" in settings["model"]["files"]
    os.utime(model / "model.safetensors", ns=(1, 1))
    assert main(overrides_for(model, tmp_path)) == 0
    assert len(list(tmp_path.glob("*/test.parquet.json"))) == 2  # other weights are another model
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(MINI / "tokenizer", tokenizer)
    for number, word in enumerate(("", "sandbox.timeout_s=3", ""), start=3):
        assert (
            main(overrides_for(model, tmp_path / "out", f"model.tokenizer_path={tokenizer}", *filter(None, [word])))
            == 0
        )
        assert len(list((tmp_path / "out").glob("*/test.parquet.json"))) == number - 2
        os.utime(tokenizer / "tokenizer.json", ns=(number, number))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("eval.benchmarks=[]", "eval.benchmarks is not set"),
        ("eval.benchmarks=[bfc]", "did you mean 'bfcl'"),
        ("eval.benchmarks=[nowhere.parquet]", "nowhere.parquet"),
        ("eval.handler=toolr", "did you mean 'toolrl'"),
        ("eval.compare=./nowhere", "compare: there is no folder"),
        ("rollout.n=2", "set rollout.temperature"),
        ("rollout.n=257", "at most 256"),
        ("eval.limitt=3", "did you mean 'eval.limit'"),
    ],
)
def test_impossible_settings_are_reported(
    model: Path, tmp_path: Path, word: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(overrides_for(model, tmp_path, word)) == 2
    assert message in " ".join(capsys.readouterr().out.split())
    assert not list(tmp_path.iterdir())


def test_tables_are_shown_in_a_narrow_terminal(tool_call_format: ChatTemplate, tmp_path: Path) -> None:
    _, records = run(tool_call_format, Counting(tool_call_format, lambda number, _: str(number)), tmp_path, category())
    done = Evaluated("m", tmp_path, SETTINGS, {"toy/all": records.of(tasks(8))})
    grid = result_grid(result_of(Benchmark("toy", (category(),)), [(category(), tasks(8))], done, 10))
    console = Console(width=60, record=True, file=io.StringIO())
    console.print(grid.for_terminal())
    assert "100.0" in console.export_text()


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def _wait(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
