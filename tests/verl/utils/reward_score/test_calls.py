"""The reward `calls`: hand-worked numbers, equality with ToolRL's reward, and the lab in every tool-call format."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import real_data
from tests.toolrl.check.lab.lab import try_reward
from toolrl.check.lab.__main__ import GOLD, as_trajectory
from verl.data.tasks import TaskSet
from verl.errors import ConfigError, DataError
from verl.formats.base import Calls, build_tool_call_format
from verl.formats.plain import PLAIN
from verl.formats.toolrl_text import TOOL_CALL, parse_gold, render_response
from verl.types import Message, ParsedResponse, Task, ToolCall, ToolSpec
from verl.utils.reward_score import build_reward
from verl.utils.reward_score.calls import CallsReward
from verl.utils.reward_score.rlla import RllaOptions, correctness_range, score_response

TOOLRL = build_tool_call_format("toolrl")
FORMATS = ("toolrl", "tool_n1", "hermes", "xml", "llama3_json", "artist_tools")
QUESTION = (Message("user", "What now?"),)
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"refined": True},
    {"intermediate": True},
    {"coarse": True},
    {"refined": True, "refined_ignores_order": True},
    {"matching": "optimal"},
    {"two_stage": True},
    {"schedule_reward": True},
    {"correct_max_1": True, "unwanted_call_penalty": 0.5},
)


def task_of(*calls: dict[str, Any], content: str = "") -> Task:
    """A task whose gold turn makes these calls, given as {"name", "parameters"}."""
    made = tuple(ToolCall(call["name"], call["parameters"]) for call in calls)
    names = {call["name"]: call["parameters"] for call in calls}
    tools = tuple(
        ToolSpec(name, "", {"type": "object", "properties": {key: {} for key in keys}}) for name, keys in names.items()
    )
    gold = Message("assistant", content, made, calls_in_content=not made)
    return Task("t#0", QUESTION, "", "own", tools=tools, gold=gold)


A = {"name": "A", "parameters": {"p": 1, "q": "z"}}
B: dict[str, Any] = {"name": "B", "parameters": {}}
CALLS = task_of(A, B)
ANSWER = task_of(content="It is noon.")


def parts(response: Message | str, task: Task, name: str = "hermes", **options: Any) -> tuple[float, float]:
    """(format, correctness)"""
    scored = CallsReward(**options).score(as_trajectory(task, response, build_tool_call_format(name)), task, 0)
    assert scored.total == pytest.approx(sum(scored.parts.values()))
    return scored.parts["format"], scored.parts["correctness"]


def calling(*calls: dict[str, Any], content: str = "") -> Message:
    gold = task_of(*calls, content=content).gold
    assert gold is not None
    return gold


# S_max = 1 + (1 + 2) + (1 + 0) = 5; correctness = 6 * points / 5 - 3
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (calling(A, B), (1.0, 3.0)),
        (calling(B, A), (1.0, 3.0)),
        (calling({"name": "A", "parameters": {"p": 2, "q": "z"}}, B), (1.0, 1.8)),
        (calling(A), (1.0, 6 * (1 / 2 + 3) / 5 - 3)),
        (calling(A, B, {"name": "C", "parameters": {"x": 1}}), (1.0, 6 * (2 / 3 + 4) / 5 - 3)),
        (calling(content="I cannot do that."), (0.0, -3.0)),
        ("", (0.0, -3.0)),
    ],
)
def test_worked_numbers_in_every_format(name: str, response: Message | str, expected: tuple[float, float]) -> None:
    if name == "xml" and isinstance(response, Message):  # it knows the type of arguments from the tool
        properties = {"p": {"type": "integer"}, "q": {"type": "string"}, "x": {"type": "integer"}}
        tools = tuple(ToolSpec(tool, "", {"type": "object", "properties": properties}) for tool in "ABC")
        assert parts(response, replace(CALLS, tools=tools), name) == pytest.approx(expected)
    else:
        assert parts(response, CALLS, name) == pytest.approx(expected)


def test_a_call_that_does_not_parse_has_no_format_and_the_lowest_correctness() -> None:
    assert parts('<tool_call>\n{"name": "A"\n</tool_call>', CALLS) == (0.0, -3.0)


def test_a_turn_without_a_call() -> None:
    assert parts("Twelve o'clock.", ANSWER) == (1.0, 0.0)
    assert parts(" \n", ANSWER) == (0.0, 0.0)  # no answer
    assert parts("<think> I do not answer. </think>", ANSWER) == (0.0, 0.0)
    for response in (calling(A), "<tool_call> oops"):
        assert parts(response, ANSWER) == (0.0, 0.0)
        assert parts(response, ANSWER, unwanted_call_penalty=0.5) == (0.0, -0.5)


def test_a_format_that_demands_a_thought_wants_one() -> None:
    written = TOOLRL.render(CALLS.gold.tool_calls)  # type: ignore[union-attr]
    assert parts(written, CALLS, "toolrl") == (0.0, 3.0)
    assert parts(f"<think> t </think>\n{written}", CALLS, "toolrl") == (1.0, 3.0)
    assert parts("Noon.", ANSWER, "toolrl") == (0.0, 0.0)
    assert parts("<think> t </think>\n<response> Noon. </response>", ANSWER, "toolrl") == (1.0, 0.0)


def test_a_response_that_is_cut_off_does_not_parse() -> None:
    whole = as_trajectory(CALLS, calling(A, B), TOOLRL)
    cut = replace(whole, turns=(replace(whole.turns[0], parsed=None),))
    assert CallsReward().score(cut, CALLS, 0).parts == {"format": 0.0, "correctness": -3.0, "length": 0.0}
    assert CallsReward().score(replace(whole, turns=()), CALLS, 0).total == -3.0


def with_value(value: Any) -> dict[str, Any]:
    return {"name": "A", "parameters": {"p": value}}


@pytest.mark.parametrize(
    ("gold", "given", "as_json", "in_python"),
    [
        (True, 1, False, True),
        (0, False, False, True),
        ([1, {"deep": [True]}], [1, {"deep": [1]}], False, True),
        ({"a": 1.0}, {"a": True}, False, True),
        (1, 1.0, True, True),
        ([True, False], [True, False], True, True),
        (1, "1", False, False),
        (None, False, False, False),
        ([], {}, False, False),
    ],
)
def test_values_have_the_types_of_json(gold: Any, given: Any, as_json: bool, in_python: bool) -> None:
    task = task_of(with_value(gold))
    for values, same in (("json", as_json), ("python", in_python)):
        for one, other in (({}, 6 * 2 / 3 - 3), ({"coarse": True}, -3.0), ({"matching": "optimal"}, 6 * 2 / 3 - 3)):
            expected = (1.0, 3.0 if same else pytest.approx(other))
            assert parts(calling(with_value(given)), task, values=values, **one) == expected
    with pytest.raises(ConfigError, match="values must be json or python, got 'bfcl'"):
        build_reward("calls", {"values": "bfcl"})


def test_arguments_nested_by_the_hundred_earn_the_lowest_correctness() -> None:
    deep: Any = 1
    for _ in range(sys.getrecursionlimit()):
        deep = [deep]
    trajectory = as_trajectory(CALLS, calling(A, B), TOOLRL)
    (turn,) = trajectory.turns
    nested = replace(turn, parsed=ParsedResponse((ToolCall("A", {"p": deep, "q": "z"}),)))
    assert CallsReward().score(replace(trajectory, turns=(nested,)), CALLS, 0).parts["correctness"] == -3.0


def test_the_first_turn_is_scored() -> None:
    first, second = (as_trajectory(CALLS, each, TOOLRL) for each in (calling(A, B), "Done."))
    both = replace(first, turns=(*first.turns, *second.turns))
    assert CallsReward().score(both, CALLS, 0).total == 4.0


def test_the_length_part_measures_the_thought() -> None:
    thought = f"<think> {'word ' * 256}</think>\n"
    scored = CallsReward(with_length=True).score(
        as_trajectory(CALLS, replace(calling(A, B), content=thought), TOOLRL), CALLS, 0
    )
    assert (scored.parts["length"], scored.total) == (0.5, 4.5)


def test_a_task_without_a_gold_turn_is_an_error_that_names_row_and_field() -> None:
    for gold in (None, Message("assistant", " ")):
        task = replace(CALLS, gold=gold)
        with pytest.raises(DataError, match=r"t#0.*'messages'.*no assistant turn"):
            CallsReward().score(as_trajectory(CALLS, "x"), task, 0)
        with pytest.raises(DataError, match="no assistant turn"):
            CallsReward().check_task(task)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, 1.0]) | st.sampled_from(["", "a", "b"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("kl"), inner, max_size=2),
    max_leaves=3,
)
CALL = st.fixed_dictionaries(
    {"name": st.sampled_from("ABC"), "parameters": st.dictionaries(st.sampled_from("pqr"), VALUES, max_size=3)}
)
CALL_LISTS = st.lists(CALL, min_size=1, max_size=4)
BROKEN = st.sampled_from(["{", '{"name": "A"}', '{"name": 1, "parameters": {}}', "[]", ""])


@pytest.mark.long
@settings(max_examples=400, deadline=None)
@given(
    CALL_LISTS,
    st.none() | st.lists(CALL | BROKEN, min_size=1, max_size=4),
    st.sampled_from(VARIANTS),
    st.integers(0, 200),
)
def test_correctness_equals_that_of_rlla(
    gold: list[Any], written: list[Any] | None, options: dict[str, Any], step: int
) -> None:
    """Any gold calls, any response of separate lines: also calls of no JSON, of no name, of no arguments."""
    lines = [each if isinstance(each, str) else json.dumps(each) for each in written or ()]
    response = "\n".join(["<think> t </think>", TOOL_CALL, *lines, "</tool_call>"])
    if written is None:
        response = "<think> t </think>\n<response> hm </response>"
    task = task_of(*gold)
    scored = CallsReward("python", **options).score(as_trajectory(task, response, TOOLRL), task, step)
    theirs = score_response(response, render_response("t", gold), step, RllaOptions(**options))
    if isinstance(TOOLRL.parse(response), Calls) or written is None:
        assert scored.parts == {"format": theirs.format, "correctness": theirs.correctness, "length": 0.0}
    else:
        lowest = correctness_range(RllaOptions(**options), step).low
        assert scored.parts["correctness"] == lowest  # rlla skips a call whose name is no text


@settings(max_examples=100, deadline=None)
@given(CALL_LISTS, st.sampled_from([0.0, 1.0]))
def test_a_gold_turn_without_calls_scores_as_in_rlla(calls: list[Any], penalty: float) -> None:
    response = render_response("t", calls)
    scored = CallsReward(unwanted_call_penalty=penalty).score(as_trajectory(ANSWER, response, TOOLRL), ANSWER, 0)
    theirs = score_response(
        response, render_response("t", None, "Noon."), 0, RllaOptions(unwanted_call_penalty=penalty)
    )
    assert tuple(scored.parts.values()) == theirs[1:]


def test_the_published_rows_score_as_in_rlla() -> None:
    """Every gold answer, and its neighbor's, against every row: format, too, since both are ToolRL's."""
    tasks = TaskSet(str(real_data("toolrl", "rlla_test.parquet")))[:200]
    different = 0
    for task, neighbor in zip(tasks, [*tasks[1:], tasks[0]], strict=True):
        own = parse_gold(task.answer)
        if own.calls is None:
            continue
        with_gold = replace(task, gold=calling(*own.calls))
        for response in (task.answer, neighbor.answer):
            scored = CallsReward().score(as_trajectory(with_gold, response, TOOLRL), with_gold, 0)
            theirs = score_response(response, task.answer, 0, RllaOptions())
            assert scored.parts["correctness"] == theirs.correctness
            different += scored.parts["format"] != theirs.format
    assert different < 20  # rlla also wants a <response> block where the gold answer has one


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("options", [{}, {"coarse": True}, {"with_length": True}, {"schedule_reward": True}])
def test_the_lab_finds_no_violation(name: str, options: dict[str, Any]) -> None:
    call = {"name": "A", "parameters": {"q": "z", "r": "y"}}
    tasks = [task_of(call), task_of(call, {"name": "B", "parameters": {}}, content="Let me see."), ANSWER]
    report = try_reward(CallsReward(**options), tasks, tool_call_format=build_tool_call_format(name))
    assert report.violations == []
    assert report.stats.keys() >= {GOLD, "half a call", "no call", "wrong name", "wrong value", "missing call"}
    assert report.stats[GOLD].responses == 3


def test_the_lab_needs_the_format() -> None:
    with pytest.raises(ConfigError, match=r"set env\.tool_call_format"):
        try_reward(CallsReward(), [CALLS], tool_call_format=PLAIN)


def test_options_are_those_of_rlla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COARSEREWARD", "1")
    reward = build_reward("calls", {"unwanted_call_penalty": 1.0})
    assert isinstance(reward, CallsReward)
    assert reward.options == RllaOptions(coarse=True, unwanted_call_penalty=1.0)
    with pytest.raises(ConfigError, match="no option"):
        build_reward("calls", {"strict": True})
