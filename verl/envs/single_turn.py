"""One reply and the episode is over: what ToolRL and Tool-N1 train on. A reward judges it.

Rows of these recipes tell of their tools in the prompt. A task may instead hold them as data, `extra["tools"]`, for the
codec of the run to tell; what the reply calls is then in its message's `tool_calls`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.envs.base import Observation, StepResult
from verl.types import Message, Task, ToolSpec


class SingleTurnEnv:
    """The task's prompt, and nothing after the policy's message."""

    def __init__(self, task: Task) -> None:
        self._task = task

    @staticmethod
    def opening(task: Task) -> Observation:
        """The prompt and the tools that the task holds."""
        return Observation(task.prompt, tuple(_tool(each) for each in task.extra.get("tools", ())))

    async def reset(self) -> Observation:
        """The opening."""
        return self.opening(self._task)

    async def step(self, message: Message) -> StepResult:
        """The end."""
        return StepResult(done=True)

    async def close(self) -> None:
        """Holds nothing."""


def _tool(told: Mapping[str, Any]) -> ToolSpec:
    return ToolSpec(told["name"], told["description"], told["parameters"])
