"""OpenAI's rows: which turns become tasks, what `tool_choice` demands, and one clear error per kind of broken row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from verl.config.schema import DataConfig
from verl.data.lengths import read_tasks
from verl.data.tasks import TaskSet, to_tasks
from verl.errors import DataError
from verl.sft.demonstrations import to_demonstration
from verl.types import Task

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
RAIN = {"type": "function", "function": {"name": "rain", "description": "Whether it rains", "parameters": CITY}}
WIND = {"type": "function", "function": {"name": "wind", "description": "Wind", "parameters": CITY}}


def call(name: str = "rain", arguments: Any = '{"city": "Oslo"}', id: str | None = "c1") -> dict[str, Any]:
    made = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return made if id is None else {"id": id, **made}


def calling(*calls: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Rain in Oslo?"}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "yes"}
ANSWER = {"role": "assistant", "content": "It rains."}
DIALOGUE = [SYSTEM, USER, calling(call()), RESULT, ANSWER]


def row(messages: Any = DIALOGUE, **more: Any) -> dict[str, Any]:
    return {"messages": messages, "tools": [RAIN, WIND], **more}


def tasks_of(given: Any, split_turns: str = "all") -> list[Task]:
    return to_tasks(given, "mine.jsonl#3", split_turns, "mine")


def test_every_assistant_turn_is_a_task_with_its_gold() -> None:
    first, second = tasks_of(row())
    assert (first.id, second.id) == ("mine.jsonl#3.0", "mine.jsonl#3.1")
    assert [each.role for each in first.prompt] == ["system", "user"]
    assert first.gold is not None and first.gold.tool_calls[0].arguments == {"city": "Oslo"}
    assert json.loads(first.answer) == [{"name": "rain", "arguments": {"city": "Oslo"}}]
    assert [each.role for each in second.prompt] == ["system", "user", "assistant", "tool"]
    assert second.prompt[3].tool_call_id == second.prompt[2].tool_calls[0].id == "c1"
    assert second.gold is not None and second.gold.content == second.answer == "It rains."
    assert {each.data_source for each in (first, second)} == {"mine"}
    assert [tool.name for tool in first.tools] == ["rain", "wind"]


def test_the_last_turn_alone() -> None:
    (task,) = tasks_of(row(), "last")
    assert task.id == "mine.jsonl#3" and task.answer == "It rains." and len(task.prompt) == 4
    assert to_demonstration(row(), "last").trained == [4] and to_demonstration(row()).trained == [2, 4]


@pytest.mark.parametrize("end", [2, 4])
def test_a_row_that_ends_with_a_prompt_has_no_gold(end: int) -> None:
    (task,) = tasks_of(row(DIALOGUE[:end]))
    assert task.gold is None and task.answer == "" and len(task.prompt) == end


def test_the_columns_of_a_task() -> None:
    more = {"data_source": "logs", "reward": "qa", "env": "single_turn", "id": 7, "extra_info": {"day": "Monday"}}
    task = tasks_of(row(**more, reward_model={"ground_truth": "dry"}))[1]
    assert (task.data_source, task.reward, task.env, task.answer) == ("logs", "qa", "single_turn", "dry")
    assert task.extra == {"id": 7, "day": "Monday"} and task.gold is not None


NAMED = {"type": "function", "function": {"name": "rain"}}


@pytest.mark.parametrize(
    ("more", "split_turns", "message"),
    [
        ({"tool_choice": "auto", "parallel_tool_calls": True}, "all", None),
        ({"tool_choice": "required"}, "all", "calls nothing under tool_choice required"),
        ({"tool_choice": "required", "messages": DIALOGUE[:3]}, "all", None),
        ({"tool_choice": NAMED, "messages": DIALOGUE[:3]}, "all", None),
        ({"tool_choice": NAMED, "messages": [USER, calling(call("wind"))]}, "all", "calls wind under tool_choice rain"),
        ({"tool_choice": "none"}, "all", "calls under tool_choice none"),
        ({"tool_choice": "required", "messages": [USER]}, "all", "cannot be demanded of the policy"),
        ({"parallel_tool_calls": False}, "all", None),
        ({"parallel_tool_calls": False, "messages": [USER, calling(call(), call(id="c2"))]}, "all", "has 2 calls"),
        ({"parallel_tool_calls": False, "messages": [USER]}, "last", "cannot be demanded"),
    ],
)
def test_requirements_of_a_request_apply_to_the_gold(
    more: dict[str, Any], split_turns: str, message: str | None
) -> None:
    if message is None:
        assert all(
            [tool.name for tool in task.tools] == ["rain", "wind"] for task in tasks_of(row(**more), split_turns)
        )
    else:
        with pytest.raises(DataError, match=message):
            tasks_of(row(**more), split_turns)


def test_no_tools_are_offered_under_tool_choice_none() -> None:
    (task,) = tasks_of(row(tool_choice="none"), "last")
    assert task.tools == () and task.answer == "It rains."
    assert to_demonstration(row(tool_choice="none"), "last").tools == ()


# {kind: (the line of the file, field, part of the message)}
BROKEN: Mapping[str, tuple[Any, str, str]] = {
    "truncated line": ('{"messages": [{"role": "us', "", "line 1 is not JSON"),
    "row is a list": ([USER], "", "is of type list; expected an object"),
    "unknown columns": ({"question": "x"}, "", "has the columns question (str), which are no known layout"),
    "messages not a list": (row({"role": "user"}), "messages", "is of type dict; expected a list"),
    "empty messages": (row([]), "messages", "is empty"),
    "wrong role": (row([{"role": "human", "content": "x"}]), "messages[0].role", "is 'human'; expected one of system"),
    "two system messages": (row([SYSTEM, SYSTEM, USER]), "messages[1].role", "Join it with the first message"),
    "assistant first": (row([ANSWER, USER, ANSWER]), "messages[0]", "expected a user message before it"),
    "null content without calls": (
        row([USER, {"role": "assistant", "content": None}]),
        "messages[1].content",
        "missing",
    ),
    "empty text": (row([{"role": "user", "content": ""}]), "messages[0].content", "is empty"),
    "image": (
        row([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        "messages[0].content[0]",
        "only text can be used",
    ),
    "function_call": (
        row([USER, {"role": "assistant", "content": None, "function_call": {"name": "rain", "arguments": "{}"}}]),
        "messages[1].function_call",
        "Write it as tool_calls",
    ),
    "arguments not JSON": (
        row([USER, calling(call(arguments="{city: Oslo}"))]),
        "messages[1].tool_calls[0].function.arguments",
        "is not JSON",
    ),
    "arguments with NaN": (
        row([USER, calling(call(arguments='{"city": NaN}'))]),
        "messages[1].tool_calls[0].function.arguments.city",
        "NaN is not a number",
    ),
    "arguments with a key twice": (
        row([USER, calling(call(arguments='{"city": "Oslo", "city": "Rome"}'))]),
        "messages[1].tool_calls[0].function.arguments",
        "has the key 'city' twice",
    ),
    "blank text": (row([{"role": "user", "content": " \n"}, ANSWER]), "messages[0].content", "is empty"),
    "untrained turn": (
        row([USER, {**ANSWER, "weight": 0}, USER, ANSWER]),
        "messages[1].weight",
        "data.split_turns=last trains the last turn only",
    ),
    "unknown tool": (
        row([USER, calling(call("snow"))]),
        "messages[1].tool_calls[0].function.name",
        "'snow' is not in tools; expected one of rain, wind",
    ),
    "calls without tools": (
        row(tools=[]),
        "messages[2].tool_calls[0].function.name",
        "the column tools, which is empty",
    ),
    "id used twice": (row([USER, calling(call(), call("wind"))]), "messages[1].tool_calls", "has the id 'c1' twice"),
    "result without id": (
        row([USER, calling(call()), {"role": "tool", "content": "yes"}, ANSWER]),
        "messages[2].tool_call_id",
        "is missing; expected one of c1, of messages[1]",
    ),
    "result of another call": (
        row([USER, calling(call()), {**RESULT, "tool_call_id": "c9"}, ANSWER]),
        "messages[2].tool_call_id",
        "'c9' is the id of no call",
    ),
    "two results of a call": (
        row([USER, calling(call()), RESULT, RESULT, ANSWER]),
        "messages[3].tool_call_id",
        "'c1' has a result already",
    ),
    "call without result": (
        row([USER, calling(call(), call("wind", id="c2")), RESULT, ANSWER]),
        "messages[1].tool_calls",
        "has no result for 'c2'",
    ),
    "result without call": (row([USER, RESULT, ANSWER]), "messages[1]", "is a result without a call"),
    "duplicate tool names": (row(tools=[RAIN, RAIN]), "tools[1]", "repeats the name 'rain'"),
    "tools not JSON": (row(tools="[{"), "tools", "is not JSON"),
    "schema not an object": (
        row(tools=[{"type": "function", "function": {"name": "rain", "parameters": [CITY]}}]),
        "tools[0].function.parameters",
        "is of type list; expected a JSON schema",
    ),
    "tool_choice of an unknown tool": (
        row(tool_choice={"type": "function", "function": {"name": "snow"}}),
        "tool_choice.function.name",
        "'snow' is not in tools; expected one of rain, wind",
    ),
    "unknown tool_choice": (row(tool_choice="any"), "tool_choice", "is 'any'; expected auto, none, required"),
    "parallel_tool_calls as text": (
        row(parallel_tool_calls="false"),
        "parallel_tool_calls",
        "is 'false'; expected true or false",
    ),
    "former columns": (row(functions=[RAIN["function"]]), "functions", "Put the functions into the column tools"),
    "unknown reward": (row(reward="kindness"), "reward", "unknown reward 'kindness'"),
    "lone surrogate": ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "messages", "lone surrogate"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_row_is_one_line_with_file_row_field_and_what_was_expected(kind: str, tmp_path: Path) -> None:
    broken, field, message = BROKEN[kind]
    path = tmp_path / "mine.jsonl"
    path.write_text(broken if isinstance(broken, str) else json.dumps(broken))
    with pytest.raises(DataError) as caught:
        TaskSet(str(path))
    error = caught.value
    assert error.file == str(path) and error.row == 0 and error.field == field
    assert message in str(error) and "\n" not in str(error) and (error.expected or error.hint)


def test_many_broken_rows_are_one_line_with_the_hint_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, [row([SYSTEM, SYSTEM, USER]), row([])])))
    hint = r"2 of 2 rows .* row 0, field 'messages\[1\].role': .*\. Join it with the first message, or raise data.max"
    with pytest.raises(DataError, match=hint):
        TaskSet(str(path), max_bad_share=0.5)


def test_a_field_that_the_prompt_drops_is_named_by_its_column(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps(row([USER, {**ANSWER, "reasoning_content": "Look."}, USER, ANSWER])))

    def prompt_ids(task: Task) -> list[int]:
        if len(task.prompt) > 1:
            raise DataError("is dropped", field="prompt[1].reasoning_content")
        return []

    with pytest.raises(DataError) as caught:
        read_tasks(str(path), prompt_ids, DataConfig(max_bad_share=0))
    assert (caught.value.row, caught.value.field) == (0, "messages[1].reasoning_content")


def test_openai_s_weight_of_a_trained_turn_is_accepted() -> None:
    (task,) = tasks_of(row([USER, {**ANSWER, "weight": 1}]))
    assert task.gold is not None and task.gold.content == "It rains." and not task.gold.template_fields


def test_a_gold_call_that_violates_its_schema_is_used_and_counted(tmp_path: Path) -> None:
    """As by ToolRL: published data has such calls, and the policy can learn them."""
    path = tmp_path / "mine.jsonl"
    bad = [call(arguments="{}"), call(arguments={"city": "Oslo", "day": 1})]
    rows = [row([USER, calling(each)]) for each in (*bad, call())]
    path.write_text("\n".join(map(json.dumps, rows)))
    report = TaskSet(str(path)).report
    assert "3 used (2 with gold calls that violate their tool's schema)" in str(report)


@pytest.mark.parametrize("blank", ["", " \n"])
def test_blank_arguments_are_none_and_counted(blank: str, tmp_path: Path) -> None:
    """As proxies write the call of a tool without parameters; one in a history counts, too."""
    path = tmp_path / "mine.jsonl"
    history = [USER, calling(call(arguments=blank)), {"role": "tool", "tool_call_id": "c1", "content": "Rain."}, ANSWER]
    rows = [row([USER, calling(call(arguments=blank))]), row(history), row([USER, calling(call())])]
    path.write_text("\n".join(map(json.dumps, rows)))
    tasks = TaskSet(str(path))
    gold = tasks[0].gold
    assert gold is not None and [each.arguments for each in gold.tool_calls] == [{}]
    assert "2 with calls of blank arguments, read as {}" in str(tasks.report)


def test_the_report_counts_rows_and_tasks(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, [row(), row([]), row(DIALOGUE[:3])])))
    tasks = TaskSet(str(path), max_bad_share=0.5)
    assert [task.id for task in tasks] == ["mine.jsonl#0.0", "mine.jsonl#0.1", "mine.jsonl#2"]
    assert str(tasks.report).startswith("mine.jsonl: 3 rows with 4 tasks, 3 used, 1 dropped (1 with a bad messages")
    last = TaskSet(str(path), 0.5, DataConfig(split_turns="last"))
    assert last[0].answer == "It rains." and len(last) == 2
