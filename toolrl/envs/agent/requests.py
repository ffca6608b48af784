"""Requests and responses, whichever API they come through."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from verl.errors import DataError
from verl.types import Completion, Message, ToolCall, ToolSpec


class ApiError(Exception):
    """A request that gets an error. The SDKs retry 408, 409, 429 and those from 500."""

    def __init__(self, status: int, code: str, problem: str, field: str | None = None) -> None:
        super().__init__(status, code, problem, field)
        self.status, self.code, self.problem, self.field = status, code, problem, field

    def __str__(self) -> str:
        return self.problem


def bad_request(problem: str, field: str) -> ApiError:
    return ApiError(400, "invalid_value", f"{field} {problem}", field)


def refused(error: DataError, field: str) -> ApiError:
    """The error of a conversation that cannot be used. field: the request's name of the place"""
    expected = f"; expected {error.expected}" if error.expected else ""
    hint = f". {error.hint}" if error.hint else ""
    return bad_request(f"{error.problem}{expected}{hint}", field)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation to respond to.

    max_tokens: of the response; None: as many as fit
    reads_calls: whether tool calls are parsed (not with tool_choice=none)
    sampling: the request's own sampling settings, which differ from the run's or may do so
    token_ids: in place of messages
    size: characters of its texts
    conversation, places: the request's names of its messages, for errors; places: empty for conversation[0], ..
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    reads_calls: bool = True
    sampling: Mapping[str, object] = field(default_factory=dict)
    token_ids: tuple[int, ...] = ()
    size: int = field(default=0, compare=False)
    conversation: str = field(default="messages", compare=False)
    places: tuple[str, ...] = field(default=(), compare=False)

    def place(self, path: str) -> str:
        """The request's own name of a place in the prompt, such as `prompt[1].content`."""
        match = re.match(r"prompt\[(\d+)\](.*)", path)
        if match is None:
            return self.conversation
        number = int(match[1])
        if not self.places:
            return f"{self.conversation}[{number}]{match[2]}"
        return self.places[number] if number < len(self.places) else self.conversation


class Finish(StrEnum):
    """Why a response ended, as the chat completions API names it."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class ChatResponse:
    """A response of the policy.

    content: its text without tool calls, end token and stop string
    stop: the stop string of the request that ended it
    pieces: as sampled
    """

    id: str
    content: str
    calls: tuple[ToolCall, ...]
    finish: Finish
    prompt_tokens: int
    pieces: tuple[Completion, ...]
    stop: str | None = None

    @property
    def completion_tokens(self) -> int:
        return sum(len(piece.token_ids) for piece in self.pieces)
