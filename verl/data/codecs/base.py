"""What a codec is: how tools are told, how calls are written, where the policy pauses, and how answers come back.

Codecs handle text alone; tokens are the framework's business. What a codec returns is tokenised once and appended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from verl.types import Message, ToolCall, ToolSpec


@dataclass(frozen=True, slots=True)
class Calls:
    """The policy asks for these, side by side."""

    calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True)
class Malformed:
    """The policy meant to call a tool, but not in a way that can be read."""

    problem: str  # in words that help the policy to do better


@dataclass(frozen=True, slots=True)
class GoOn:
    """The policy paused at a stop string without asking for anything yet: it is to go on from where it is."""


@dataclass(frozen=True, slots=True)
class Final:
    """The policy is done: this is its answer."""


Parsed = Calls | Malformed | GoOn | Final


class Codec(Protocol):
    """One format. Stateless: the same text gives the same answer, and it never raises for what a policy wrote."""

    def opening(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str | Sequence[Message]:
        """The prompt: messages for the model's chat template, or a plain text where the recipe uses no template."""

    @property
    def template_tools(self) -> bool:
        """Whether the chat template is to tell of the tools itself (`tools=`), so that `opening` does not."""

    def stop_strings(self, written: str) -> tuple[str, ...]:
        """Where the policy is to pause, besides at its end token. `written`: its text since the last observation."""

    def parse(self, written: str) -> Parsed:
        """What the policy asks for. Calls inside its thinking are none.

        `written`: all of its text since the last observation, the stop string that it paused at included.
        """

    def observation(self, results: Sequence[Message], written: str) -> str | Sequence[Message]:
        """The answers as they are put before the policy: a text that continues its own turn, or messages that the
        chat template puts into turns of their own, with the head of the policy's next turn."""
