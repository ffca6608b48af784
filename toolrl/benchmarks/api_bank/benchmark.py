"""API-Bank (arXiv 2304.08244) as prepared by ToolRL: a dialogue, its tools, and the single gold next call.

ToolRL's handler uses each row's prompt verbatim, as in its published scores. For any other handler, the tools and the
dialogue are parsed from the row, and the handler's format renders the tools and the earlier calls.
"""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from toolrl.benchmarks.runner.benchmark import Aggregate, Benchmark, BenchmarkContext, Category, EpisodeConfig
from toolrl.benchmarks.runner.files import find_file, numbered_rows
from toolrl.benchmarks.runner.handlers import check_several_tools
from verl.errors import DataError
from verl.formats.base import Calls, ToolCallFormat, build_tool_call_format
from verl.formats.toolrl import ToolRlFormat
from verl.formats.toolrl_text import TOOLS_HEADING, parse_calls
from verl.types import Message, Task, ToolCall, ToolSpec

_LEVELS = (1, 2, 3)
_HINT = "it is benchmarks/API-Bank/{} of ToolRL's repository (qiancheng0/ToolRL)"
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


def api_bank(context: BenchmarkContext) -> Benchmark:
    """Three levels, 399, 67 and 131 rows; the overall score is the mean over all rows."""
    check_several_tools("api_bank", context.tool_call_format)
    tool_call_format = build_tool_call_format(context.tool_call_format)
    # tools are disabled in the last turn, so one turn with tools needs max_turns=2; the second never takes place
    episode = EpisodeConfig("api_bank", max_turns=2, feedback_on_parse_error=False)
    levels = tuple(
        Category(f"api_bank/level_{level}", partial(_tasks, context, tool_call_format, level), episode, metric="soft")
        for level in _LEVELS
    )
    overall = Aggregate("api_bank/overall", tuple(level.name for level in levels), over="rows")
    notes = (
        "soft: any call equals the gold call, ToolRL's rule; strict: the only call equals the gold call",
        "ToolRL's scores use its own prompt (handler toolrl), greedy, with 4096 tokens for prompt and response",
        "handler xml carries no types: there gold calls use the types of the row's tool, and 52 golds with a value of "
        "another type than their tool's (a list with Python's quotes, an empty number) cannot be matched",
        "the gold calls of six rows of level 2 use a tool that the row does not list; they count, as in ToolRL",
    )
    return Benchmark("api_bank", levels, (overall,), notes)


def _tasks(context: BenchmarkContext, tool_call_format: ToolCallFormat, level: int) -> list[Task]:
    file = f"level-{level}-api_processed.json"
    path = find_file(context.data_dir, (file, f"apibank_level-{level}.json"), _HINT.format(file))
    fields: dict[str, type | tuple[type, ...]] = {"system": str, "user": str, "answer": (list, dict)}
    return [_task(name, row, tool_call_format) for name, row in numbered_rows(path, fields)]


def _task(name: str, row: Mapping[str, Any], tool_call_format: ToolCallFormat) -> Task:
    try:
        system, _, listed = row["system"].partition(TOOLS_HEADING)
        tools = _tools(listed)
        answer = json.dumps(_as_read(_gold(row["answer"]), tools, tool_call_format))
        prompt: tuple[Message, ...] = (Message("system", system.strip()), *_dialogue(row["user"], tool_call_format))
    except DataError as error:
        raise error.at(file=name) from error
    if isinstance(tool_call_format, ToolRlFormat):  # the row already is a prompt in this format, tools included
        return Task(name, (Message("system", row["system"]), Message("user", row["user"])), answer, "api_bank")
    return Task(name, prompt, answer, "api_bank", extra={"tools": tools})


def _gold(answer: list[Any] | dict[str, Any]) -> dict[str, Any]:
    (call,) = answer if isinstance(answer, list) and len(answer) == 1 else (answer,)
    fields = call if isinstance(call, dict) else {}
    if not isinstance(fields.get("name"), str) or not isinstance(fields.get("parameters"), dict):
        raise DataError("is not a call", "one {name: str, parameters: object}, in a list or not", field="answer")
    return {"name": fields["name"], "parameters": fields["parameters"]}


def _as_read(
    gold: dict[str, Any], tools: Sequence[Mapping[str, Any]], tool_call_format: ToolCallFormat
) -> dict[str, Any]:
    """The gold call after a round trip through the format: many rows have "4" for a number; untyped formats lose it."""
    rendered = tool_call_format.render([ToolCall(gold["name"], gold["parameters"])])
    parsed = tool_call_format.parse(rendered, [ToolSpec(**tool) for tool in tools])
    if not isinstance(parsed, Calls):
        return gold
    (call,) = parsed.calls
    return {"name": call.name, "parameters": dict(call.arguments)}


def _tools(listed: str) -> list[dict[str, Any]]:
    """The numbered list as schemas. It does not mark required parameters."""
    entries = _TOOL.findall(listed)
    if not entries or len(entries) != listed.count("\nParameters: "):
        raise DataError("lists no parseable tools", f"{TOOLS_HEADING} and a numbered list", field="system")
    return [_tool(name or short, description, text) for name, short, description, text in entries]


def _tool(name: str, description: str, parameters: str) -> dict[str, Any]:
    try:
        properties = {
            key: {**_KINDS[spec["type"]], "description": spec["description"]}
            for key, spec in ast.literal_eval(parameters).items()
        }
    except _BAD as error:
        raise DataError(
            f"parameters of {name!r} cannot be parsed ({type(error).__name__}: {error})",
            f"a Python dict of {{name: {{type, description}}}} with the types {', '.join(_KINDS)}",
            field="system",
        ) from error
    return {"name": name, "description": description, "parameters": {"type": "object", "properties": properties}}


def _dialogue(history: str, tool_call_format: ToolCallFormat) -> list[Message]:
    """The blocks as messages; earlier calls and their results rendered in the format."""
    if _BLOCK.sub("", history).strip(" *\n") != "Dialogue Records History":
        raise DataError("is not a dialogue", "blocks <user>, <response>, <tool_call> and <obs>", field="user")
    messages: list[Message] = []
    calls: list[ToolCall] = []
    for kind, text in _BLOCK.findall(history):
        if kind == "user":
            messages.append(Message("user", text.strip()))
        elif kind == "response":
            messages.append(Message("assistant", text.strip()))
        elif kind == "tool_call":
            calls = _calls(text.strip())
            messages.append(Message("assistant", tool_call_format.render(calls)))
        elif not calls or messages[-1].role != "assistant":
            raise DataError("an <obs> without a preceding call", "a <tool_call> before it", field="user")
        else:
            result = Message("tool", text.strip(), tool=calls[-1].name)
            observation = tool_call_format.observation([result], messages[-1].content)
            assert not isinstance(observation, str), "only single-tool formats continue within a turn"
            messages += observation
    return messages


def _calls(text: str) -> list[ToolCall]:
    try:
        return [ToolCall(str(call["name"]), dict(call["parameters"])) for call in parse_calls(text)]
    except _BAD as error:
        problem = f"an earlier call is invalid ({type(error).__name__}: {error})"
        raise DataError(problem, "JSON, one call per line", field="user") from error
