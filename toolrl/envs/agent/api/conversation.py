"""Shared by the conversation APIs: checks of messages and tool choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolrl.envs.agent.api.fields import Fields
from toolrl.envs.agent.requests import ApiError, bad_request, refused
from verl.data.messages import read_messages, read_tools
from verl.errors import DataError
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


class Choice(Fields):
    """A choice of tools that is an object, in which some may be named."""

    type: str


def constraints(choice: str | Choice, tools: Sequence[ToolSpec], strict: bool) -> dict[str, object]:
    """Fields that count as sampling settings: they need constrained decoding, whose log-probs are not the policy's.

    choice: of tools, any but auto or none; strict: of any tool. Raises ApiError.
    """
    required: dict[str, object] = {"strict": True} if strict else {}
    kind = choice if isinstance(choice, str) else choice.type
    if kind in ("auto", "none"):
        return required
    if not tools:
        raise bad_request("needs tools", "tool_choice")
    if unknown := [name for name in _names(choice) if name not in {tool.name for tool in tools}]:
        raise bad_request(f"names {unknown[0]!r}, which is not in tools", "tool_choice")
    return required | {"tool_choice": kind}


def _names(choice: object) -> list[str]:
    """Of the tools in a choice, at any depth of its object."""
    match choice:
        case Fields():
            return _names(choice.model_dump())
        case {"name": str(name)}:
            return [name]
        case dict():
            return _names(list(choice.values()))
        case list():
            return [name for each in choice for name in _names(each)]
    return []
