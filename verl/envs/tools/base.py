"""What a tool is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from verl.types import Task, ToolSpec


class ToolError(Exception):
    """The call was at fault (bad arguments, code that raises); the text is what the policy gets to see."""


class ToolTimeoutError(ToolError):
    """The call took longer than it may; the text is what the policy gets to see."""


@runtime_checkable
class Tool(Protocol):
    """Something that a policy can call. Concurrent calls of one tool must not disturb each other."""

    @property
    def spec(self) -> ToolSpec:
        """Name, description and parameters, as the policy is told them."""

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """What the policy gets to see. `arguments` fit the schema.

        Raises ToolError for what is the policy's fault, verl.errors.ServiceDownError for what is not. How long a
        call may take, and how much of its answer is shown, is the caller's business.
        """

    async def close(self) -> None:
        """End what it holds."""


@runtime_checkable
class EpisodeTool(Protocol):
    """A tool whose state belongs to one episode: an interpreter, a folder, a shopping cart.

    It is opened for every episode, and what `open` gives is closed at the episode's end. The calls of one message to an
    ordinary tool are made side by side; those to an opened one are made one after the other, as the policy wrote them.
    """

    @property
    def spec(self) -> ToolSpec:
        """Name, description and parameters; the same for every episode."""

    async def open(self, task: Task) -> Tool:
        """The tool of one episode. What is dear is better made at the first call: many episodes make none."""

    async def close(self) -> None:
        """End what the episodes share."""


@runtime_checkable
class Toolset(Protocol):
    """Several tools from one source, such as a server."""

    @property
    def tools(self) -> Sequence[Tool]:
        """Those that are there."""
