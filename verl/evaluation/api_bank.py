"""API-Bank (arXiv 2304.08244) as ToolRL prepared it: a dialogue, its tools, and the one call that has to come next.

ToolRL's handler gets every row in the row's own words, which are those of its published figures. For any other one the
tools and the dialogue are read out of them, and its format tells of the tools and writes the calls made earlier.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from verl.data.formats.base import Calls, ToolCallFormat, build_tool_call_format
from verl.data.formats.toolrl import ToolRlFormat
from verl.errors import DataError
from verl.evaluation.base import Aggregate, Benchmark, BenchmarkContext, Category, EpisodeConfig
from verl.evaluation.files import find_file, numbered_rows
from verl.evaluation.handlers import check_several_tools
from verl.types import Message, Task, ToolCall, ToolSpec
from verl.utils.reward_score.parsing import parse_calls
from verl.utils.reward_score.prompt import TOOLS_HEADING

_LEVELS = (1, 2, 3)
_MEND = "it is benchmarks/API-Bank/{} of ToolRL's repository (qiancheng0/ToolRL)"
_TOOL = re.compile(r"^\d+\. (?:Name: (.*)\nDescription: |(.*?): )(.*)\nParameters: (.*)$", re.MULTILINE)
_BLOCK = re.compile(r"<(user|response|tool_call|obs)>(.*?)</\1>", re.DOTALL)
_KINDS: Mapping[str, Mapping[str, Any]] = {
    "str": {"type": "string"},
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "bool": {"type": "boolean"},
    "list": {"type": "array"},
    "list(str)": {"type": "array", "items": {"type": "string"}},
}
_BAD = (KeyError, TypeError, ValueError, SyntaxError, AttributeError, RecursionError, MemoryError)  # also ast's


def api_bank(setting: BenchmarkContext) -> Benchmark:
    """Three levels, 399, 67 and 131 rows; the overall figure is the mean over all rows."""
    check_several_tools("api_bank", setting.tool_call_format)
    tool_call_format = build_tool_call_format(setting.tool_call_format)
    # one turn that may call; a second is never played, but without it the first would be the last, which calls nothing
    play = EpisodeConfig("api_bank", max_turns=2, feedback_on_parse_error=False)
    levels = tuple(
        Category(f"api_bank/level_{level}", partial(_tasks, setting, tool_call_format, level), play, metric="soft")
        for level in _LEVELS
    )
    overall = Aggregate("api_bank/overall", tuple(level.name for level in levels), over="rows")
    notes = (
        "soft: any call equals the gold call, ToolRL's rule; strict: there is one call, and it does",
        "ToolRL's figures are those of its own prompt (handler toolrl), greedy, with 4096 tokens for prompt and reply",
        "handler xml writes no types: there a gold call has those of the row's tool, and 52 golds with a value that "
        "their tool's type forbids (a list with Python's quotes, an empty number) cannot be right",
        "the gold calls of six rows of level 2 name a tool that the row does not list; they count, as in ToolRL",
    )
    return Benchmark("api_bank", levels, (overall,), notes)


def _tasks(setting: BenchmarkContext, tool_call_format: ToolCallFormat, level: int) -> list[Task]:
    own = f"level-{level}-api_processed.json"
    path = find_file(setting.data_dir, (own, f"apibank_level-{level}.json"), _MEND.format(own))
    fields: dict[str, type | tuple[type, ...]] = {"system": str, "user": str, "answer": (list, dict)}
    return [_task(name, row, tool_call_format) for name, row in numbered_rows(path, fields)]


def _task(name: str, row: Mapping[str, Any], tool_call_format: ToolCallFormat) -> Task:
    try:
        told, _, listed = row["system"].partition(TOOLS_HEADING)
        tools = _tools(listed)
        answer = json.dumps(_as_read(_gold(row["answer"]), tools, tool_call_format))
        prompt: tuple[Message, ...] = (Message("system", told.strip()), *_dialogue(row["user"], tool_call_format))
    except DataError as error:
        raise error.at(file=name) from error
    if isinstance(tool_call_format, ToolRlFormat):  # the row is a prompt of this format, with its own list of tools
        return Task(name, (Message("system", row["system"]), Message("user", row["user"])), answer, "api_bank")
    return Task(name, prompt, answer, "api_bank", extra={"tools": tools})


def _gold(answer: list[Any] | dict[str, Any]) -> dict[str, Any]:
    (call,) = answer if isinstance(answer, list) and len(answer) == 1 else (answer,)
    if (
        not isinstance(call, dict)
        or not isinstance(call.get("name"), str)
        or not isinstance(call.get("parameters"), dict)
    ):
        raise DataError("is no call", "one {name: str, parameters: object}, in a list or not", field="answer")
    return {"name": call["name"], "parameters": call["parameters"]}


def _as_read(
    gold: dict[str, Any], tools: Sequence[Mapping[str, Any]], tool_call_format: ToolCallFormat
) -> dict[str, Any]:
    """The gold as the format reads it: many rows write a number as "4", which a format without types cannot express."""
    parsed = tool_call_format.parse(
        tool_call_format.render([ToolCall(gold["name"], gold["parameters"])]), [ToolSpec(**tool) for tool in tools]
    )
    if not isinstance(parsed, Calls):
        return gold
    (call,) = parsed.calls
    return {"name": call.name, "parameters": dict(call.arguments)}


def _tools(listed: str) -> list[dict[str, Any]]:
    """The numbered list as schemas. Which parameters must be given, it does not say."""
    entries = _TOOL.findall(listed)
    if not entries or len(entries) != listed.count("\nParameters: "):
        raise DataError("lists no tools that can be read", f"{TOOLS_HEADING} and a numbered list", field="system")
    return [_tool(name or short, description, text) for name, short, description, text in entries]


def _tool(name: str, description: str, parameters: str) -> dict[str, Any]:
    try:
        properties = {
            key: {**_KINDS[told["type"]], "description": told["description"]}
            for key, told in ast.literal_eval(parameters).items()
        }
    except _BAD as error:
        raise DataError(
            f"parameters of {name!r} cannot be read ({type(error).__name__}: {error})",
            f"a Python dict of {{name: {{type, description}}}} with the types {', '.join(_KINDS)}",
            field="system",
        ) from error
    return {"name": name, "description": description, "parameters": {"type": "object", "properties": properties}}


def _dialogue(history: str, tool_call_format: ToolCallFormat) -> list[Message]:
    """The blocks as messages; earlier calls and their results as the format writes them."""
    if _BLOCK.sub("", history).strip(" *\n") != "Dialogue Records History":
        raise DataError("is no dialogue", "blocks <user>, <response>, <tool_call> and <obs>", field="user")
    said: list[Message] = []
    calls: list[ToolCall] = []
    for kind, text in _BLOCK.findall(history):
        if kind == "user":
            said.append(Message("user", text.strip()))
        elif kind == "response":
            said.append(Message("assistant", text.strip()))
        elif kind == "tool_call":
            calls = _calls(text.strip())
            said.append(Message("assistant", tool_call_format.render(calls)))
        elif not calls or said[-1].role != "assistant":
            raise DataError("an <obs> follows no call", "a <tool_call> before it", field="user")
        else:
            shown = tool_call_format.observation([Message("tool", text.strip(), tool=calls[-1].name)], said[-1].content)
            assert not isinstance(shown, str), "only formats of one tool go on within a turn"
            said += shown
    return said


def _calls(text: str) -> list[ToolCall]:
    try:
        return [ToolCall(str(call["name"]), dict(call["parameters"])) for call in parse_calls(text)]
    except _BAD as error:
        raise DataError(
            f"an earlier call cannot be read ({type(error).__name__}: {error})", "JSON, one call a line", field="user"
        ) from error
