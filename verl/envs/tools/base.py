"""The tool interface."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from verl.types import Task, ToolSpec


class ToolError(Exception):
    """The call failed through the policy (bad arguments, code that raises); the policy sees the message."""


class ToolTimeoutError(ToolError):
    """The call timed out; the policy sees the message."""


@runtime_checkable
class Tool(Protocol):
    """A tool that the policy can call. Concurrent calls must be independent."""

    @property
    def spec(self) -> ToolSpec:
        """Name, description and parameters, as the policy sees them."""

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """The answer shown to the policy. `arguments` satisfy the schema.

        Raises ToolError for the policy's errors, verl.errors.ServiceDownError for infrastructure faults. Timeouts and
        truncation of long answers are up to the caller.
        """

    async def close(self) -> None:
        """Release its resources."""


@runtime_checkable
class EpisodeTool(Protocol):
    """A tool whose state belongs to one episode: an interpreter, a folder, a shopping cart.

    It is opened per episode, and the opened tool is closed at the episode's end. Calls of one message to an ordinary
    tool run concurrently; those to an opened tool run sequentially, in the order of the message.
    """

    @property
    def spec(self) -> ToolSpec:
        """Name, description and parameters; the same for every episode."""

    async def open(self, task: Task) -> Tool:
        """The tool of one episode. Defer expensive setup to the first call: many episodes make none."""

    async def close(self) -> None:
        """Release shared resources."""
