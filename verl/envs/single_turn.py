"""One response and the episode is over: what ToolRL and Tool-N1 train on. A reward judges it.

Rows of these recipes describe their tools in the prompt. A task may instead hold them as data, `Task.tools` or
`extra["tools"]`, for the format of the run to list; what the response calls is then in its message's `tool_calls`.
"""

from __future__ import annotations

from verl.data.messages import read_tools
from verl.envs.base import Observation, StepResult
from verl.errors import DataError
from verl.types import Message, Task


class SingleTurnEnv:
    """The task's prompt, and nothing after the policy's message."""

    def __init__(self, task: Task) -> None:
        self._task = task

    @staticmethod
    def initial_observation(task: Task) -> Observation:
        """The prompt and the tools that the task holds. Raises DataError for two lists of them."""
        more = read_tools(task.extra.get("tools"), "extra_info.tools")
        if more and task.tools:
            raise DataError("are given in extra_info.tools, too", "one list", field="tools")
        return Observation(task.prompt, task.tools or more)

    async def reset(self) -> Observation:
        """The opening."""
        return self.initial_observation(self._task)

    async def step(self, message: Message) -> StepResult:
        """The end."""
        return StepResult(done=True)

    async def close(self) -> None:
        """Holds nothing."""
