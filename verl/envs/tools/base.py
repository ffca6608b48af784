"""What a tool is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from verl.types import ToolSpec


class ToolError(Exception):
    """The call was at fault (bad arguments, code that raises); the text is what the policy gets to see."""


class ToolTimeoutError(ToolError):
    """The call took longer than it may; the text is what the policy gets to see."""


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
