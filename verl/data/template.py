"""Does all that a row says stand in what the chat template makes of it? Templates leave out what they do not know.

Templates are rendered, not parsed: the row is rendered once more with a unique marker in every place, and all markers
must be found. So it does not matter how a template writes, trims or quotes what it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from verl.errors import DataError
from verl.types import Message, ToolCall, ToolSpec

Render = Callable[[Sequence[Message], Sequence[ToolSpec]], str]  # with the head of the assistant's turn

_QUESTION, _ANSWER = Message("user", "a"), Message("assistant", "b")
_NOTHING: tuple[Any, ...] = (None, "", [], {})  # as in the annotations of OpenAI's responses
_MEND = "Change the row, or name a tokenizer whose chat template has it with model.tokenizer_path"
_TOOL_MEND = (
    "name a tokenizer whose chat template lists tools with model.tokenizer_path, or, where a codec is chosen, one that "
    "lists them itself, such as env.tool_call_format=toolrl"
)


def tools_left_out(render: Render, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[str]:
    """What is not to be found of the tools in a rendering of these messages: names, and names of parameters."""
    marked = [_marked_tool(tool, f"Tool{number}") for number, tool in enumerate(tools)]
    text = render(messages, marked)
    lacking = []
    for tool, stand_in in zip(tools, marked, strict=True):
        if stand_in.name not in text:
            lacking.append(tool.name)
        names = zip(_parameters(tool), _parameters(stand_in), strict=True)
        lacking += [f"{tool.name}({name})" for name, mark in names if mark not in text]
    return lacking


def _marked_tool(tool: ToolSpec, mark: str) -> ToolSpec:
    """The tool with markers for its name and parameters, in OpenAI's form."""
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
    """Raises DataError for the first message, with its index and field, of which the template leaves something out.

    column: that the messages are of
    """
    marked = [_marked(message, f"Row{number}") for number, message in enumerate(messages)]
    text = render(marked, tools)
    position = 0  # templates write messages in their order, so that one pass finds many
    for number, (message, stand_in) in enumerate(zip(messages, marked, strict=True)):
        field = f"{column}[{number}]"
        if stand_in.content.strip():
            found = text.find(stand_in.content, position)
            if found < 0 and stand_in.content not in text:
                raise _left_out(message, f"{field}.content")
            position = max(position, found)
        for place, call in enumerate(stand_in.tool_calls if not message.calls_in_content else ()):
            if not all(mark in text for mark in (call.name, *call.arguments, *call.arguments.values())):
                raise _left_out(message, f"{field}.tool_calls[{place}]")
        for key, value in message.template_fields.items():
            if value not in _NOTHING and not _is_used(render, message.role, key, value):
                raise _left_out(message, f"{field}.{key}")


def _left_out(message: Message, field: str) -> DataError:
    return DataError(f"is left out by the chat template (role {message.role})", hint=_MEND, field=field)


def _marked(message: Message, mark: str) -> Message:
    """The message with a unique marker for its content, and for the name and each argument of its calls."""
    calls = tuple(
        replace(
            call,
            name=f"{mark}Call{number}Name",
            arguments={
                f"{mark}Call{number}Key{place}End": f"{mark}Call{number}Value{place}End"
                for place in range(len(call.arguments))
            },
        )
        for number, call in enumerate(message.tool_calls)
    )
    return replace(message, content=f"{mark}Content" if message.content.strip() else message.content, tool_calls=calls)


def _is_used(render: Render, role: str, key: str, value: Any) -> bool:
    """Whether a field makes a difference in the last message of its role: templates drop thoughts of earlier ones."""

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
    """The message about tools that are not listed."""
    shown = ", ".join(lacking[:3]) + (", .." if len(lacking) > 3 else "")
    return f"{where} lists no tools, so that the policy would never learn of {shown}; {_TOOL_MEND}"
