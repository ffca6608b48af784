"""What the APIs for conversations have in common: checks of messages and of the choice of tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl.data.messages import read_messages, read_tools
from verl.errors import DataError
from verl.kit.agent.requests import ApiError, bad_request, refused
from verl.types import Message, ToolSpec


def conversation(messages: Any, field: str) -> tuple[Message, ...]:
    """The messages, in OpenAI's format. field: their name in the request. Raises ApiError."""
    try:
        read = read_messages(messages, field)
    except DataError as error:
        raise _unreadable(error, error.field) from error
    if read[-1].role == "assistant":
        raise bad_request("ends with an assistant message, which cannot be continued", field)
    return read


def listed_tools(tools: Any, parameters: str = "parameters") -> tuple[ToolSpec, ...]:
    """The tools, in OpenAI's format. parameters: their schema's name in the request. Raises ApiError."""
    try:
        return read_tools(tools)
    except DataError as error:
        raise _unreadable(error, error.field.replace("].parameters", f"].{parameters}")) from error


def _unreadable(error: DataError, field: str) -> ApiError:
    return refused(DataError(error.problem, error.expected), field)  # hints are for rows of data


def given_sampling(body: Mapping[str, Any], settings: Mapping[str, object]) -> dict[str, object]:
    """The sampling settings of the request. settings: {name: the value that changes nothing}"""
    return {name: body[name] for name in settings if body.get(name) not in (None, settings[name])}


def constraints(choice: object, named: Sequence[str], tools: Sequence[ToolSpec], strict: bool) -> dict[str, object]:
    """Fields that count as sampling settings: they need constrained decoding, whose log-probs are not the policy's.

    choice: of tools, any but auto or none; named: the tools in it; strict: of any tool. Raises ApiError.
    """
    found: dict[str, object] = {"strict": True} if strict else {}
    if choice in ("auto", "none"):
        return found
    if not tools:
        raise bad_request("needs tools", "tool_choice")
    if unknown := [name for name in named if name not in {tool.name for tool in tools}]:
        raise bad_request(f"names {unknown[0]!r}, which is not in tools", "tool_choice")
    return found | {"tool_choice": choice}
