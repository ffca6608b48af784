"""BFCL's verdict on single calls: hand-worked, and the same as that of the package's own checker."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.toolrl.benchmarks.bfcl.bfcl_oracle import ast_checker, gold_calls, spoiled, with_calls
from toolrl.benchmarks.bfcl.benchmark import LIVE_AST, NON_LIVE_AST, single_turn_tasks
from toolrl.benchmarks.bfcl.reward import BfclReward
from toolrl.benchmarks.bfcl.tasks import bfcl_rows
from toolrl.check.lab.__main__ import as_trajectory
from verl.errors import DataError
from verl.types import Message, Score, Task, ToolCall
from verl.utils.reward_score import build_reward

STAGES = ("names", "parameters", "types", "values")
BOOK = {
    "name": "book.table",
    "description": "Books a table.",
    "parameters": {
        "type": "object",
        "required": ["place"],
        "properties": {
            "place": {"type": "string"},
            "people": {"type": "integer"},
            "hour": {"type": "number"},
            "outside": {"type": "boolean"},
            "dishes": {"type": "array", "items": {"type": "string"}},
            "guest": {"type": "object"},
            "guests": {"type": "array", "items": {"type": "object"}},
            "note": {},
        },
    },
}
ACCEPTED: dict[str, Any] = {
    "place": ["Chez Rémy, Paris", "Chez Rémy"],
    "people": [2, ""],
    "hour": [19.5, 20, ""],
    "outside": [True, ""],
    "dishes": [["Soup", "Fish-Cake"], ""],
    "guest": [{"name": ["Ada", "Ms. Ada"], "age": [36, ""]}, ""],
    "guests": [[{"name": ["Ada"]}, {"name": ["Bob"]}], ""],
    "note": [7, ""],
}


def task_of(*key: Any, answer: str | None = None) -> Task:
    gold = json.dumps(list(key)) if answer is None else answer
    return Task("row#0", (Message("user", "book"),), gold, "bfcl", extra={"tools": [BOOK, {**BOOK, "name": "cancel"}]})


def judge(task: Task, *calls: ToolCall) -> Score:
    return BfclReward().score(with_calls(task, calls), task, step=0)


def book(**arguments: Any) -> ToolCall:
    return ToolCall("book.table", {"place": "Chez Rémy", **arguments})


@pytest.mark.parametrize(
    ("arguments", "right", "stage"),
    [
        ({}, True, 4),
        ({"place": "chez RÉMY paris."}, True, 4),  # case, comma and point are not read
        ({"place": "Chez Remy"}, False, 3),
        ({"place": ["Chez Rémy"]}, False, 2),
        ({"people": 2}, True, 4),
        ({"people": 2.0}, False, 2),
        ({"people": "2"}, False, 2),
        ({"people": True}, False, 2),
        ({"hour": 20}, True, 4),  # a whole number does for a float
        ({"hour": 19.5}, True, 4),
        ({"hour": 10**400}, False, 2),
        ({"outside": 1}, False, 2),
        ({"dishes": ["soup", "FISH CAKE"]}, True, 4),
        ({"dishes": ["Fish-Cake", "Soup"]}, False, 3),
        ({"dishes": []}, True, 4),  # BFCL's oddity: as good as left out
        ({"dishes": ["Soup", 1]}, False, 3),  # "" takes items of any type, but then the values differ
        ({"guest": {"name": "ms ada"}}, True, 4),
        ({"guest": {"name": "Ada", "age": 37}}, False, 3),
        ({"guest": {"age": 36}}, False, 3),
        ({"guest": {"name": "Ada", "x": 1}}, False, 3),
        ({"guests": [{"name": "Ada"}, {"name": "Bob"}]}, True, 4),
        ({"guests": [{"name": "Bob"}, {"name": "Ada"}]}, False, 3),
        ({"guests": [{"name": "Ada"}]}, False, 3),
        ({"note": 7}, True, 4),  # no documented type: that of the key's first value does, too
        ({"note": "7"}, False, 3),
        ({"invented": 1}, False, 1),
    ],
)
def test_one_call_by_hand(arguments: dict[str, Any], right: bool, stage: int) -> None:
    score = judge(task_of({"book.table": ACCEPTED}), book(**arguments))
    assert score.total == score.parts["correct"] == float(right) and score.parts["count"] == 1.0
    assert [score.parts[name] for name in STAGES] == [1.0] * stage + [0.0] * (4 - stage)


def test_names_keep_their_dots_and_parameters_are_needed() -> None:
    task = task_of({"book.table": ACCEPTED})
    assert judge(task, ToolCall("book_table", {"place": "Chez Rémy"})).parts["names"] == 0.0
    missing = judge(task, ToolCall("book.table", {"people": 2}))
    assert (missing.parts["names"], missing.parts["parameters"]) == (1.0, 0.0)
    needed = task_of({"book.table": {"place": ["a"], "people": [2]}})  # not required, but the key does not do without
    assert judge(needed, ToolCall("book.table", {"place": "a"})).total == 0.0
    unknown_to_the_key = judge(needed, ToolCall("book.table", {"place": "a", "people": 2, "outside": False}))
    assert unknown_to_the_key.parts["parameters"] == 0.0


def test_calls_are_paired_in_any_order_and_counted() -> None:
    task = task_of(
        {"book.table": {"place": ["a", "b"]}}, {"book.table": {"place": ["a"]}}, {"cancel": {"place": ["c"]}}
    )
    a, b, c = book(place="a"), book(place="b"), ToolCall("cancel", {"place": "c"})
    assert judge(task, c, b, a).total == 1.0
    assert judge(task, c, a, b).total == 0.0  # each entry takes the first that fits, as in BFCL
    short = judge(task, c, b)
    assert (short.total, short.parts["count"], short.parts["names"]) == (0.0, 0.0, 0.0)
    long = judge(task, c, b, a, a)
    assert (long.total, long.parts["count"], long.parts["values"]) == (0.0, 0.0, 1.0)


def test_rows_on_which_no_call_or_any_call_is_right() -> None:
    none, some = task_of(), task_of(answer='"any"')
    assert (judge(none).total, judge(none, book()).total) == (1.0, 0.0)
    assert (judge(some).total, judge(some, ToolCall("whatever", {})).total) == (0.0, 1.0)
    assert BfclReward().score(as_trajectory(some, "book.table(place='a')"), some, 0).total == 0.0


@pytest.mark.parametrize(
    "answer", ["", "null", "3", '"some"', '["book.table"]', '[{"book.table": 3}]', '[{"unknown": {"place": ["a"]}}]']
)
def test_an_unreadable_answer_key_is_an_error(answer: str) -> None:
    with pytest.raises(DataError, match=r"row#0, field 'answer'"):
        judge(task_of(answer=answer), book())


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists))
def test_any_argument_has_a_verdict(value: Any) -> None:
    for name in ACCEPTED:
        assert judge(task_of({"book.table": ACCEPTED}), book(**{name: value})).total in (0.0, 1.0)
        inside = {name: {"name": value}, "guests": [value, {"name": value}]}
        assert judge(task_of({"book.table": ACCEPTED}), book(**inside)).total in (0.0, 1.0)


def test_the_packages_own_checker_judges_alike() -> None:
    pytest.importorskip("bfcl_eval", reason="needs the optional package bfcl-eval (pip install --no-deps bfcl-eval)")
    reward, chance = build_reward("bfcl"), random.Random(7)
    verdicts = []
    for category in (*NON_LIVE_AST, *LIVE_AST):
        theirs = ast_checker(category)
        package = {row["id"]: (row["function"], truth) for row, truth in bfcl_rows(category, ("function",))}
        for task in single_turn_tasks(category):
            gold = gold_calls(task)
            for calls in (gold, spoiled(gold, task, chance)):
                functions, truth = package[task.id]
                ours = reward.score(with_calls(task, calls), task, 0).total == 1.0
                assert ours == theirs(functions, calls, truth), (task.id, calls, truth)
                assert ours or calls is not gold, task.id
                verdicts.append(ours)
    spoiled_ones = verdicts[1::2]
    assert len(spoiled_ones) > 2000 and 0.1 < sum(spoiled_ones) / len(spoiled_ones) < 0.5
