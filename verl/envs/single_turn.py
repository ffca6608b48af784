"""Single-turn episodes, as in ToolRL and Tool-N1: one response, scored by a reward function.

Rows of these recipes describe their tools in the prompt. A task may instead hold them as data, `Task.tools` or
`extra["tools"]`, for the run's tool-call format to list; parsed calls are then in the message's `tool_calls`.
"""

from verl.data.messages import read_tools
from verl.envs.base import Env, Observation, StepResult
from verl.errors import DataError
from verl.types import Message, Task


class SingleTurnEnv(Env):
    """The task's prompt; the policy's first message ends the episode."""

    def __init__(self, task: Task) -> None:
        self._task = task

    @staticmethod
    def initial_observation(task: Task) -> Observation:
        """The prompt and the tools of the task. Raises DataError if two lists of tools are given."""
        more = read_tools(task.extra.get("tools"), "extra_info.tools")
        if more and task.tools:
            raise DataError("are given in extra_info.tools, too", "one list", field="tools")
        return Observation(task.prompt, task.tools or more)

    async def reset(self) -> Observation:
        return self.initial_observation(self._task)

    async def step(self, message: Message) -> StepResult:
        return StepResult(done=True)
