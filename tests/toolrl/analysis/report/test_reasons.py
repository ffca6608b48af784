"""Why a response has its score: by hand, and against the reward for every corrupted response."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import MINI
from toolrl.analysis.report.folder import read_run
from toolrl.analysis.report.reasons import Reasons, reasons_of
from verl.checkpoint.state import CHANGES
from verl.data.tasks import TaskSet
from verl.tracking.jsonl import write_jsonl
from verl.types import Message
from verl.utils.reward_score.rlla import RllaOptions, RllaReward, score_response

PLAIN = Reasons(RllaOptions(), None)
GOLD = [{"name": "book", "parameters": {"city": "Oslo", "days": 2}}, {"name": "pay", "parameters": {"sum": 5}}]


def text(*calls: dict[str, Any]) -> str:
    return "<think> so </think>\n<tool_call>\n" + "\n".join(map(json.dumps, calls)) + "\n</tool_call>"


def rollout(response: str, answer: str, options: RllaOptions | None = None, step: int = 3) -> dict[str, Any]:
    score = score_response(response, answer, step, options or RllaOptions())
    parts = {"format": score.format, "correctness": score.correctness, "length": score.length}
    messages = [{"role": "assistant", "content": response}]
    return {"step": step, "responses": messages, "answer": answer, "score": {"total": score.score, "parts": parts}}


def test_matched_calls_by_hand() -> None:
    """Names: 1 of 3 in common. The call has both parameters' names, 1 point, and one of two values: 2 of 3 points."""
    strange = {"name": "sing", "parameters": {}}
    response = text(strange, {"name": "book", "parameters": {"city": "Rome", "days": 2}})
    assert PLAIN.of(rollout(response, text(*GOLD))) == [
        "format 1: exactly the blocks of the gold, a thought and calls",
        "names of the tools: 0.333333 of 1 point",
        'gold call 1, book({"city": "Oslo", "days": 2}): call 2, book({"city": "Rome", "days": 2}), 2 of 3 points; '
        "another value: city",
        'gold call 2, pay({"sum": 5}): no call matches, 0 of 2 points',
        "call 1, sing({}): matches no gold call",
        "correctness: -3 + (3 - -3) * 2.333 / 6 = -0.6667",
    ]


@pytest.mark.parametrize(
    ("response", "line"),
    [
        (text(*GOLD), "correctness 3, the maximum: the calls are the gold calls"),
        ("<think> so </think>", "correctness -3, the minimum: the response has no <tool_call> block"),
        (text(GOLD[0]).replace("}}", "}"), "correctness -3: the calls cannot be read (Expecting ',' delimiter"),
        ("<think> so </think>\n<tool_call>\n3\n</tool_call>", "correctness -3: the calls cannot be read"),
        ("no tag", "format 0: not the blocks of the gold, a thought and calls"),
    ],
)
def test_other_outcomes_are_named(response: str, line: str) -> None:
    assert any(each.startswith(line) for each in PLAIN.of(rollout(response, text(*GOLD))))


@pytest.mark.parametrize("name", ["", "refined", "intermediate", "coarse", "correct_max_1", "schedule_reward"])
def test_every_corrupted_response_is_explained(name: str) -> None:
    options = RllaOptions(**{name: True}) if name else RllaOptions()  # type: ignore[arg-type]
    reward = RllaReward(**({name: True} if name else {}))
    for task in TaskSet(str(MINI / "test.parquet"))[:10]:
        for mutation in reward.mutations(task, 3):
            response = mutation.text
            written = response.content if isinstance(response, Message) else str(response)
            assert Reasons(options, None).of(rollout(written.strip(), task.answer, options))


def test_calls_are_read_where_the_format_left_them() -> None:
    """The reward `calls`: gold calls as JSON, native calls beside the content."""
    gold = json.dumps([{"name": each["name"], "arguments": each["parameters"]} for each in GOLD])
    message = {"role": "assistant", "content": "", "tool_calls": [{"name": "pay", "arguments": {"sum": 6}}]}
    # names 1 of 2; the call 1 of 2 points: -3 + 6 * 1.5 / 6
    row = {"step": 1, "responses": [message], "answer": gold, "score": {"total": 0, "parts": {"correctness": -1.5}}}
    lines = PLAIN.of(row)
    assert lines[-1] == "correctness: -3 + (3 - -3) * 1.5 / 6 = -1.5" and "another value: sum" in lines[-2]
    row["responses"] = [{"role": "assistant", "content": "I cannot."}]
    row["score"] = {"parts": {"correctness": -3.0}}
    assert PLAIN.of(row) == ["correctness -3, the minimum: the response calls no tool"]


def test_a_score_it_cannot_explain_has_no_explanation() -> None:
    row = rollout(text(*GOLD), text(*GOLD))
    row["score"]["parts"]["correctness"] = 2.9
    assert PLAIN.of(row) == [] == PLAIN.of({"responses": []}) == PLAIN.of({**row, "score": {"parts": {}}})


def test_only_runs_with_such_a_reward_are_explained(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("reward:\n  name: rlla\n  options: {refined: true}\n")
    found = reasons_of(read_run(tmp_path))
    assert found is not None and found.options.refined
    for damaged in ("reward:\n  name: mine.py:mine\n", "reward:\n  name: rlla\n  options: {unknown: 1}\n", "a: ["):
        path.write_text(damaged)
        assert reasons_of(read_run(tmp_path)) is None


def test_every_part_has_to_be_the_recorded_one() -> None:
    """ToolRL's schedule: the response of step 50 is scored with 49 steps done, and correctness is 0 in all of them."""
    answer, options = "<think> so </think>\n<response> yes </response>", RllaOptions(schedule_reward=True)
    row = {**rollout(answer, answer, options, step=49), "step": 50}
    points = 2 - 49 / 150
    assert (
        Reasons(options, None).of(row)[0]
        == f"format {points:g}: exactly the blocks of the gold, a thought and an answer"
    )
    row["score"]["parts"]["format"] = 0.5
    assert Reasons(options, None).of(row) == [] == PLAIN.of(row)


def test_the_length_part_has_its_arithmetic() -> None:
    options = RllaOptions(with_length=True)
    short = "<think> so it is </think>\n<response> yes </response>"
    long = short.replace("so it is", "so " * 256)
    assert Reasons(options, None).of(rollout(long, short, options))[-1] == (
        "length 0.5: the thought has 256 words, and 512 give 1 point"  # words: allowed
    )
    assert Reasons(options, None).of(rollout("yes", short, options))[-1] == "length 0: the response has no thought"


@pytest.mark.parametrize(("points", "known"), [(1.0, "parses"), (0.0, "does not parse"), (0.5, None)])
def test_the_format_of_calls_is_one_of_two(points: float, known: str | None) -> None:
    gold = json.dumps([{"name": "pay", "arguments": {"sum": 5}}])
    message = {"role": "assistant", "content": "", "tool_calls": [{"name": "pay", "arguments": {"sum": 5}}]}
    parts = {"format": points, "correctness": 3.0, "length": 0.0}
    lines = PLAIN.of(
        {"step": 1, "responses": [message], "answer": gold, "score": {"total": 3 + points, "parts": parts}}
    )
    assert [line.startswith(f"format {points:g}: the response {known}") for line in lines[:1]] == [True] * bool(known)


def test_the_reward_follows_from_the_recorded_variables(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("reward:\n  name: rlla\n  options: {}\n")
    starts = [{"step": 0, "toolrl": "1", "COARSEREWARD": "1"}, {"step": 7, "toolrl": "1", "REFINEDREWARD": "1"}]
    write_jsonl(tmp_path / "code_version.json", starts)
    change = {"COARSEREWARD": {"before": "1", "now": None}, "REFINEDREWARD": {"before": None, "now": "1"}}
    write_jsonl(tmp_path / CHANGES, [{"step": 7, "changed": change}, {"step": "x"}])
    run = read_run(tmp_path)
    assert "after step 7 the run went on with other COARSEREWARD, REFINEDREWARD" in run.notes
    assert any(note.startswith("allowed_changes.jsonl: 1 of 2 lines") for note in run.notes), run.notes
    assert run.settings["export REFINEDREWARD"] == "1" and run.code == {"toolrl": "1"}
    found = reasons_of(run)
    assert found is not None and found.options == RllaOptions(refined=True)
