"""API-Bank: gold calls are right under every handler, responses score by the rule, rows that cannot be used are
named."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import real_data
from tests.support.every import every
from tests.toolrl.benchmarks.runner.eval_play import category, scores
from toolrl.benchmarks.api_bank.benchmark import api_bank
from toolrl.benchmarks.runner.benchmark import BenchmarkContext
from verl.errors import ConfigError, DataError
from verl.formats.base import ParseError, build_tool_call_format
from verl.types import Message, Task, ToolCall, ToolSpec

GOLD = {"name": "Add", "parameters": {"a": "1", "b": ["x"]}}
SYSTEM = """Be helpful.

**Available Tools**
In your response, you can use the following tools:
1. Name: Add
Description: Adds.
Parameters: {'a': {'type': 'str', 'description': "A's."}, 'b': {'type': 'list(str)', 'description': 'B.'}}
2. Name: Drop
Description: Drops.
Parameters: {}

**Output Format**
1. as above"""
USER = """**Dialogue Records History**
<user>Look, then add.</user>
<tool_call>
{"name": "Look", "parameters": {"at": "it"}}
</tool_call>
<obs> {'seen': 1} </obs>
<response>I saw it.</response>

<user> Go on. </user>
"""


def row(**changed: Any) -> dict[str, Any]:
    return {"system": SYSTEM, "user": USER, "answer": [GOLD], **changed}


def setting(folder: Path, tool_call_format: str, *rows: dict[str, Any]) -> BenchmarkContext:
    for level in (1, 2, 3):
        (folder / f"level-{level}-api_processed.json").write_text(json.dumps(rows))
    return BenchmarkContext(folder, tool_call_format=tool_call_format)


def gold_response(tool_call_format: str, task: Task) -> str:
    gold = json.loads(task.answer)
    return build_tool_call_format(tool_call_format).render([ToolCall(gold["name"], gold["parameters"])])


@pytest.mark.parametrize(("level", "rows"), [(1, 399), (2, 67), (3, 131)])
@pytest.mark.parametrize("tool_call_format", ["toolrl", "hermes"])
def test_the_gold_call_is_right_in_every_published_row(level: int, rows: int, tool_call_format: str) -> None:
    folder = real_data("toolrl", "benchmarks", "apibank_level-1.json").parents[1]
    one = category(api_bank(BenchmarkContext(folder, tool_call_format=tool_call_format)), f"api_bank/level_{level}")
    found = scores(one, tool_call_format, lambda task: [gold_response(tool_call_format, task)])
    assert len(found) == rows
    assert all(score.parts == {"soft": 1.0, "strict": 1.0} for score in found)


@pytest.mark.parametrize("tool_call_format", ["llama3_json", "tool_n1", "xml"])
def test_the_gold_call_is_right_under_other_handlers(tool_call_format: str) -> None:
    folder = real_data("toolrl", "benchmarks", "apibank_level-1.json").parent
    for level in api_bank(BenchmarkContext(folder, tool_call_format=tool_call_format)).categories:
        few = level.tasks()[:8]
        found = scores(level, tool_call_format, lambda task: [gold_response(tool_call_format, task)], few)
        assert [score.total for score in found] == [float(can_be_written(tool_call_format, task)) for task in few]
        assert every(score.total == 0 for score in scores(level, tool_call_format, lambda _: ["I cannot."], few))


def can_be_written(tool_call_format: str, task: Task) -> bool:
    tools = [ToolSpec(**tool) for tool in task.extra["tools"]]
    return not isinstance(
        build_tool_call_format(tool_call_format).parse(gold_response(tool_call_format, task), tools), ParseError
    )


def test_golds_with_forbidden_types_are_as_many_as_documented() -> None:
    """The format without types has the tool's: "4" for an integer is 4, and a list with Python's quotes is none."""
    folder = real_data("toolrl", "benchmarks", "apibank_level-1.json").parent
    found = api_bank(BenchmarkContext(folder, tool_call_format="xml"))
    tasks = [task for level in found.categories for task in level.tasks()]
    forbidden = sum(not can_be_written("xml", task) for task in tasks)
    assert any(f"{forbidden} golds with a value" in note for note in found.notes)
    (likes,) = (json.loads(task.answer) for task in tasks if task.id.endswith("level-3.json#68"))
    assert likes == {"name": "LikeCount", "parameters": {"post_id": 4}}


def test_toolrl_reads_the_prompt_of_the_row_and_other_handlers_the_dialogue(tmp_path: Path) -> None:
    (own,) = api_bank(setting(tmp_path, "toolrl", row())).categories[0].tasks()
    assert own.prompt == (Message("system", SYSTEM), Message("user", USER))
    (read,) = api_bank(setting(tmp_path, "hermes", row())).categories[0].tasks()
    assert read.prompt == (
        Message("system", "Be helpful."),
        Message("user", "Look, then add."),
        Message("assistant", '<tool_call>\n{"name": "Look", "arguments": {"at": "it"}}\n</tool_call>'),
        Message("tool", "{'seen': 1}", tool="Look"),
        Message("assistant", "I saw it."),
        Message("user", "Go on."),
    )
    add, drop = read.extra["tools"]
    assert add == {
        "name": "Add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "string", "description": "A's."},
                "b": {"type": "array", "items": {"type": "string"}, "description": "B."},
            },
        },
    }
    assert drop == {"name": "Drop", "description": "Drops.", "parameters": {"type": "object", "properties": {}}}


def test_level_three_describes_tools_on_one_line(tmp_path: Path) -> None:
    short = SYSTEM.replace("Name: Add\nDescription: Adds.", "Add: Adds: sums.")
    (task,) = api_bank(setting(tmp_path, "hermes", row(system=short))).categories[2].tasks()
    assert [(tool["name"], tool["description"]) for tool in task.extra["tools"]] == [
        ("Add", "Adds: sums."),
        ("Drop", "Drops."),
    ]


RIGHT = '{"name": "Add", "parameters": {"a": "1", "b": ["x"]}}'


@pytest.mark.parametrize(
    ("lines", "soft", "strict"),
    [
        ([RIGHT], 1, 1),
        (['{"name": "Add", "parameters": {"b": ["x"], "a": "1"}}'], 1, 1),  # in any order
        ([RIGHT, RIGHT], 1, 0),
        (['{"name": "Drop", "parameters": {}}', RIGHT], 1, 0),
        (['{"name": "Add", "parameters": {"a": 1, "b": ["x"]}}'], 0, 0),  # a number is no text
        (['{"name": "Add", "parameters": {"a": "1"}}'], 0, 0),
        (['{"name": "add", "parameters": {"a": "1", "b": ["x"]}}'], 0, 0),
        (['{"a": "1", "b": ["x"]}'], 1, 0),  # without a name: the parameters of the gold call
        (['{"name": "Add", "arguments": {"a": "1", "b": ["x"]}}'], 0, 0),
        (["no JSON", "[1]", RIGHT], 1, 0),
        (["[" * 100_000, RIGHT], 1, 0),
        ([], 0, 0),
    ],
)
def test_soft_and_strict_by_hand(tmp_path: Path, lines: list[str], soft: int, strict: int) -> None:
    one = api_bank(setting(tmp_path, "toolrl", row(answer=GOLD))).categories[0]
    response = "\n".join(["<think> t </think>", "<tool_call>", *lines, "</tool_call>"])
    (score,) = scores(one, "toolrl", lambda _: [response])
    assert (score.total, dict(score.parts)) == (soft, {"soft": soft, "strict": strict})


def toolrl_rule(response: str) -> float:
    """ToolRL's generate.py and evaluate.py, written anew: the calls of a response, then their comparison."""
    calls = []
    for line in response.strip().split("<tool_call>")[-1].split("</tool_call>")[0].strip().split("\n"):
        try:
            calls.append(json.loads(line))
        except Exception:  # noqa: BLE001  as there
            continue
    try:
        for call in calls:
            if isinstance(call, str):
                call = json.loads(call)
            name, parameters = GOLD["name"], call
            if "name" in call and "parameters" in call:
                name, parameters = call["name"], call["parameters"]
            if name == GOLD["name"] and parameters == GOLD["parameters"]:
                return 1.0
    except Exception:  # noqa: BLE001  as there: what was found so far counts
        pass
    return 0.0


WRONG = '{"name": "Drop", "parameters": {}}'
FENCED = f"```json\n{RIGHT}\n```"
KINDS = (
    RIGHT, f"<think> t </think>\n{RIGHT}", FENCED, f"<think> t </think>\n<tool_call>\n{RIGHT}",
    f"<tool_call>\n{RIGHT}\n</tool_call>\n<tool_call>\n{WRONG}\n</tool_call>",
    f"<tool_call>\n{WRONG}\n</tool_call>\n<tool_call>\n{RIGHT}\n</tool_call>",
    f"<tool_call>\n1\n{RIGHT}\n</tool_call>", f"<tool_call>\nnull\n{RIGHT}\n</tool_call>",
    f"<tool_call>\n{RIGHT}\n1\n</tool_call>", f"<tool_call>\n{json.dumps(RIGHT)}\n</tool_call>",
    f'<tool_call>\n"x"\n{RIGHT}\n</tool_call>', f'<tool_call>\n"name parameters"\n{RIGHT}\n</tool_call>',
    f'<tool_call>\n["name", "parameters"]\n{RIGHT}\n</tool_call>', f"<tool_call>\n[{RIGHT}]\n</tool_call>",
    f"<think> <tool_call>\n{RIGHT}\n</tool_call> </think>\n<response> Done. </response>",
    f"<tool_call>\n{RIGHT}\n</tool_call>\n<think> <tool_call>\n{WRONG}\n</tool_call> </think>",
    f"{RIGHT}\n<tool_call>\n{WRONG}\n</tool_call>", f"{RIGHT}\n</tool_call>", f"{RIGHT} </tool_call> {WRONG}",
    f"<tool_call>{RIGHT}</tool_call>", f"<tool_call>\n\n  {RIGHT}  \n</tool_call>",
    f"<tool_call>\r\n{RIGHT}\r\n</tool_call>", "I cannot.", "",
    '<tool_call>\n{"a": "1", "b": ["x"], "a": "1"}\n</tool_call>', f'<tool_call>\n{{"a": NaN}}\n{RIGHT}',
)  # fmt: skip


def test_soft_is_toolrls_rule_for_every_kind_of_response(tmp_path: Path) -> None:
    one = api_bank(setting(tmp_path, "toolrl", row(answer=GOLD))).categories[0]
    rng = random.Random(3)
    pieces = (
        RIGHT,
        WRONG,
        "<tool_call>\n",
        "\n</tool_call>",
        "<think>",
        "</think>",
        "\n",
        "1",
        '"x"',
        '{"a": "1"}',
        "[]",
    )
    soups = ["".join(rng.choices(pieces, k=rng.randint(1, 9))) for _ in range(500)]
    (task,) = one.tasks()
    for response in (*KINDS, *soups):
        (score,) = scores(one, "toolrl", lambda _, text=response: [text], [task])  # type: ignore[misc]
        assert score.total == toolrl_rule(response), response


def test_no_response_hangs(tmp_path: Path) -> None:
    one = api_bank(setting(tmp_path, "toolrl", row())).categories[0]
    for piece in ("<tool_call>\n", "<tool_call>{</tool_call>", '{"a":', "</think><think>"):
        hostile = f"<tool_call>\n{piece * (50_000 // len(piece))}\n</tool_call>"
        assert scores(one, "toolrl", lambda _, text=hostile: [text])[0].total == 0.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"answer": []}, "answer"),
        ({"answer": [GOLD, GOLD]}, "answer"),
        ({"answer": {"name": "Add", "parameters": "a"}}, "answer"),
        ({"answer": "Add"}, "answer"),
        ({"system": "Be helpful."}, "system"),
        ({"system": SYSTEM.replace("'a': {'type': 'str'", "'a': {'type': 'complex'")}, "system"),
        ({"system": SYSTEM.replace("Parameters: {}", "Parameters: {")}, "system"),
        ({"user": "Hello"}, "user"),
        ({"user": USER.replace('"Look",', "Look,")}, "user"),
        ({"user": USER.replace("<tool_call>", "<response>").replace("</tool_call>", "</response>")}, "user"),
        ({"user": 7}, "user"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path: Path, changed: dict[str, Any], field: str) -> None:
    one = api_bank(setting(tmp_path, "hermes", row(), row(**changed))).categories[0]
    with pytest.raises(DataError) as caught:
        one.tasks()
    message = str(caught.value)
    assert (
        f"field {field!r}" in message
        and "level-1-api_processed.json" in message
        and ("#1" in message or "row 1" in message)
    )


def test_missing_data_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"level-2-api_processed.json .* ToolRL's repository"):
        api_bank(BenchmarkContext(tmp_path, tool_call_format="hermes")).categories[1].tasks()
    with pytest.raises(ConfigError, match="supports a single tool only"):
        api_bank(BenchmarkContext(tmp_path, tool_call_format="search_r1"))
