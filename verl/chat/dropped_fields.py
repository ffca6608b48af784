"""Checks that a chat template drops nothing of a row: templates silently ignore fields that they do not know.

Templates are rendered, not parsed: the row is rendered again with a unique marker in every place, and all markers must
appear in the output. So it does not matter how a template formats, trims or quotes its input.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from verl.errors import DataError
from verl.types import Message, ToolCall, ToolSpec

Render = Callable[[Sequence[Message], Sequence[ToolSpec]], str]  # includes the generation prompt

_QUESTION, _ANSWER = Message("user", "a"), Message("assistant", "b")
_EMPTY: tuple[Any, ...] = (None, "", [], {})  # as in the annotations of OpenAI's responses
# Markers, which one pass over a text finds.
_TOOL_MARK = re.compile(r"Tool\d+(?:Name|Parameter\d+End)")
_ROW_MARK = re.compile(r"Row\d+(?:Content|Call\d+(?:Name|Key\d+End|Value\d+End))")
_HINT = "Leave it out, or set model.tokenizer_path to a tokenizer whose chat template supports it"
_TOOL_HINT = (
    "set model.tokenizer_path to a tokenizer whose chat template lists tools, or use a tool-call format that lists "
    "them itself, such as env.tool_call_format=toolrl"
)


def tools_left_out(render: Render, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[str]:
    """Names of tools and of tool parameters that are missing in a rendering of these messages."""
    marked = [_marked_tool(tool, f"Tool{number}") for number, tool in enumerate(tools)]
    shown = set(_TOOL_MARK.findall(render(messages, marked)))
    lacking = []
    for tool, stand_in in zip(tools, marked, strict=True):
        if stand_in.name not in shown:
            lacking.append(tool.name)
        names = zip(_parameters(tool), _parameters(stand_in), strict=True)
        lacking += [f"{tool.name}({name})" for name, mark in names if mark not in shown]
    return lacking


def _marked_tool(tool: ToolSpec, mark: str) -> ToolSpec:
    """The tool with markers for its name and parameters, in OpenAI's format."""
    properties = {f"{mark}Parameter{number}End": {"type": "string"} for number in range(len(_parameters(tool)))}
    function = {
        "name": f"{mark}Name",
        "description": tool.description,
        "parameters": {**tool.parameters, "properties": properties, "required": []},
    }
    return ToolSpec(**function, schema={"type": "function", "function": function})  # type: ignore[arg-type]


def _parameters(tool: ToolSpec) -> list[str]:
    return list(tool.parameters.get("properties") or {})


def check_messages(render: Render, messages: Sequence[Message], tools: Sequence[ToolSpec], column: str) -> None:
    """Raises DataError, with index and field, for the first message of which the template drops a part.

    column: the messages' column
    """
    marked = [_marked(message, f"Row{number}") for number, message in enumerate(messages)]
    shown = set(_ROW_MARK.findall(render(marked, tools)))
    for number, (message, stand_in) in enumerate(zip(messages, marked, strict=True)):
        field = f"{column}[{number}]"
        if stand_in.content.strip() and stand_in.content not in shown:
            raise _left_out(message, f"{field}.content")
        for place, call in enumerate(stand_in.tool_calls if not message.calls_in_content else ()):
            if not all(mark in shown for mark in (call.name, *call.arguments, *call.arguments.values())):
                raise _left_out(message, f"{field}.tool_calls[{place}]")
        for key, value in message.template_fields.items():
            if value not in _EMPTY and not _is_used(render, message.role, key, value):
                raise _left_out(message, f"{field}.{key}")


def _left_out(message: Message, field: str) -> DataError:
    return DataError(f"is dropped by the chat template (role {message.role})", hint=_HINT, field=field)


def _marked(message: Message, mark: str) -> Message:
    """The message with unique markers for its content and for the names and arguments of its calls."""
    calls = []
    for number, call in enumerate(message.tool_calls):
        own = f"{mark}Call{number}"
        arguments = {f"{own}Key{place}End": f"{own}Value{place}End" for place in range(len(call.arguments))}
        calls.append(replace(call, name=f"{own}Name", arguments=arguments))
    content = f"{mark}Content" if message.content.strip() else message.content
    return replace(message, content=content, tool_calls=tuple(calls))


def _is_used(render: Render, role: str, key: str, value: Any) -> bool:
    """Whether the template uses a field in the last message of its role (many drop thoughts of earlier ones)."""

    def rendered(fields: Mapping[str, Any]) -> str:
        message = Message(role, "c", template_fields=fields)
        match role:
            case "system" | "developer":
                return render((message, _QUESTION), ())
            case "user":
                return render((message,), ())
            case "assistant":
                return render((_QUESTION, message), ())
        call = replace(_ANSWER, tool_calls=(ToolCall("d", {}),), calls_in_content=False)
        return render((_QUESTION, call, message), ())

    return rendered({key: value}) != rendered({})


def tool_fault(lacking: Sequence[str], where: str) -> str:
    shown = ", ".join(lacking[:3]) + (", .." if len(lacking) > 3 else "")
    return f"{where} does not list tools, so the policy would not know {shown}; {_TOOL_HINT}"
