"""One reply and the episode is over: what ToolRL and Tool-N1 train on. A reward judges it."""

from __future__ import annotations

from verl.envs.base import Observation, StepResult
from verl.types import Message, Task


class SingleTurnEnv:
    """The task's prompt, and nothing after the policy's message."""

    def __init__(self, task: Task) -> None:
        self._task = task

    async def reset(self) -> Observation:
        """The prompt; tools, if any, are described in it."""
        return Observation(self._task.prompt)

    async def step(self, message: Message) -> StepResult:
        """The end."""
        return StepResult(done=True)

    async def close(self) -> None:
        """Holds nothing."""
