"""Rows in TRL's forms: what SFT, DPO and RL learn of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verl.data.tasks import TaskSet
from verl.errors import DataError
from verl.sft.demonstrations import read_demonstrations
from verl.sft.pairs import read_preferences
from verl.tracking.jsonl import write_jsonl

USER, RIGHT, WRONG = "2 + 2?", "It is 4.", "It is 5."
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds", "parameters": {"type": "object"}}}


def message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


ASKED, ANSWERED, MISSED = message("user", USER), message("assistant", RIGHT), message("assistant", WRONG)
CALLED = {
    "role": "assistant",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}],
}


def written(tmp_path: Path, row: dict[str, Any]) -> str:
    write_jsonl(tmp_path / "rows.jsonl", [row])
    return str(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(("prompt", "text"), [(USER, True), ([ASKED], False)])
def test_a_prompt_alone_is_a_task_without_a_gold(prompt: Any, text: bool, tmp_path: Path) -> None:
    """Whose reward a function of the user's may compute, of texts where the prompt is one."""
    (task,) = TaskSet(written(tmp_path, {"prompt": prompt}))
    assert [(each.role, each.content) for each in task.prompt] == [("user", USER)]
    assert (task.gold, task.answer, task.text_prompt) == (None, "", text)


def test_messages_that_begin_with_the_prompt_are_all_read(tmp_path: Path) -> None:
    """As in ultrachat_200k."""
    row = {"prompt": USER, "prompt_id": "x", "messages": [ASKED, ANSWERED, ASKED, MISSED]}
    (demonstration,) = read_demonstrations(written(tmp_path, row))
    assert len(demonstration.messages) == 4 and demonstration.first == 1
    assert [task.answer for task in TaskSet(written(tmp_path, row))] == [RIGHT, WRONG]


def test_a_prompt_alone_with_a_turn_that_would_be_its_gold_is_refused(tmp_path: Path) -> None:
    for row in ({"prompt": [ASKED, ANSWERED]}, {"prompt": [ASKED], "agent_name": "tool_agent"}):
        with pytest.raises(DataError, match="'reward_model'"):
            TaskSet(written(tmp_path, row))


@pytest.mark.parametrize("row", [{"prompt": USER, "completion": RIGHT}, {"prompt": [ASKED], "completion": [ANSWERED]}])
def test_a_completion_is_trained_and_is_the_gold(row: dict[str, Any], tmp_path: Path) -> None:
    (demonstration,) = read_demonstrations(written(tmp_path, row))
    (task,) = TaskSet(written(tmp_path, row))
    assert [(each.role, each.content) for each in demonstration.messages] == [("user", USER), ("assistant", RIGHT)]
    assert demonstration.first == 1 and task.answer == RIGHT and [each.content for each in task.prompt] == [USER]


def test_a_task_with_a_completion_stays_a_task(tmp_path: Path) -> None:
    row = {"prompt": [ASKED], "completion": "4", "reward_model": {"ground_truth": "5"}}
    (task,) = TaskSet(written(tmp_path, row))
    assert task.gold is None and task.answer == "5"


def test_a_completion_with_calls_and_results_trains_all_its_turns(tmp_path: Path) -> None:
    row = {"prompt": [ASKED], "completion": [CALLED, message("tool", "4"), ANSWERED], "tools": [TOOL]}
    (demonstration,) = read_demonstrations(written(tmp_path, row))
    assert demonstration.first == 1 and len(demonstration.messages) == 4 and demonstration.tools[0].name == "add"
    tasks = TaskSet(written(tmp_path, row))
    assert [task.gold and task.gold.content for task in tasks] == ["", RIGHT]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": USER, "chosen": RIGHT, "rejected": WRONG},
        {"prompt": [ASKED], "chosen": [ANSWERED], "rejected": [MISSED]},
        {"prompt": json.dumps([ASKED]), "chosen": RIGHT, "rejected": WRONG},
        {"chosen": [ASKED, ANSWERED], "rejected": [ASKED, MISSED]},
        {"prompt": USER, "chosen": [ASKED, ANSWERED], "rejected": [ASKED, MISSED]},
        {
            "prompt": USER,  # as in ultrafeedback_binarized
            "messages": [ASKED, ANSWERED],
            "chosen": [ASKED, ANSWERED],
            "rejected": [ASKED, MISSED],
        },
        {"messages": [ASKED], "chosen": RIGHT, "rejected": MISSED},  # ours
    ],
)
def test_a_pair_is_a_prompt_with_two_responses(row: dict[str, Any], tmp_path: Path) -> None:
    (pair,) = read_preferences(written(tmp_path, row))
    for side, content in ((pair.chosen, RIGHT), (pair.rejected, WRONG)):
        assert [(each.role, each.content) for each in side.messages] == [("user", USER), ("assistant", content)]
        assert side.first == 1
    (task,) = tasks = TaskSet(written(tmp_path, row))
    assert [each.content for each in task.prompt] == [USER] and task.gold is None
    assert "1 with chosen and rejected responses, which toolrl sft sft.loss=dpo reads" in str(tasks.report)


SYSTEM, MORE = message("system", "Be brief."), message("user", "And 3 + 3?")


@pytest.mark.parametrize(
    ("row", "contents"),
    [
        ({"prompt": [ASKED]}, [USER, RIGHT, MORE["content"]]),  # the sides share turns of a longer response
        ({"prompt": USER}, [USER, RIGHT, MORE["content"]]),
        ({"prompt": [SYSTEM, ASKED]}, ["Be brief.", USER, RIGHT, MORE["content"]]),
        ({"prompt": [SYSTEM], "before": [ASKED]}, ["Be brief.", USER, RIGHT, MORE["content"]]),
        ({"prompt": USER, "before": [SYSTEM, ASKED]}, ["Be brief.", USER, RIGHT, MORE["content"]]),
        ({"before": [SYSTEM, ASKED]}, ["Be brief.", USER, RIGHT, MORE["content"]]),
    ],
)
def test_nothing_of_a_pair_that_shares_turns_is_lost(row: dict[str, Any], contents: list[str], tmp_path: Path) -> None:
    begins = [*row.get("before", []), ANSWERED, MORE]
    sides = {"chosen": [*begins, message("assistant", "6")], "rejected": [*begins, message("assistant", "7")]}
    (pair,) = read_preferences(written(tmp_path, {**row, **sides}))
    assert [each.content for each in pair.chosen.messages] == [*contents, "6"]
    assert [each.content for each in pair.rejected.messages] == [*contents, "7"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": USER, "completion": RIGHT, "label": False}, "'label': marks unpaired preferences"),
        ({"prompt": [ASKED, ANSWERED, ASKED], "completion": RIGHT}, "'prompt': has turns of the assistant"),
        ({"prompt": USER, "completion": RIGHT, "messages": [ASKED, MISSED]}, "'completion': is given beside messages"),
        ({"prompt": "3 + 3?", "messages": [ASKED, ANSWERED]}, "'prompt': is no beginning of messages"),
    ],
)
def test_what_trl_trains_otherwise_is_refused(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    for read in (read_demonstrations, TaskSet):
        with pytest.raises(DataError, match=message):
            read(written(tmp_path, row))


@pytest.mark.parametrize("shared", [{"prompt": USER}, {}])
def test_equal_sides_are_refused(shared: dict[str, Any], tmp_path: Path) -> None:
    side = [ANSWERED] if shared else [ASKED, ANSWERED]
    with pytest.raises(DataError, match="'rejected': is the same as chosen"):
        read_preferences(written(tmp_path, {**shared, "chosen": side, "rejected": side}))


def test_sides_without_a_prompt_and_a_common_beginning_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'prompt': is missing, and chosen and rejected begin differently"):
        read_preferences(written(tmp_path, {"chosen": RIGHT, "rejected": WRONG}))
    longer = {"chosen": [ASKED, ANSWERED, ASKED, ANSWERED], "rejected": [ASKED, MISSED]}
    with pytest.raises(DataError, match="'chosen': has 3 messages"):
        read_preferences(written(tmp_path, longer))
