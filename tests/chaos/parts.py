"""What the runs of the chaos suite act in: a reward, a format and an environment, the same for the same text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from verl.envs.base import Observation, StepResult
from verl.formats.base import Calls, Final, Parsed
from verl.types import Message, Task, ToolCall, ToolSpec, ToolStatus, ToolUse

SCORING_S = 0.05  # long enough to be met at it
CALL_S = 0.3
_PAUSES = tuple("aeiou ")  # an untrained model writes no end token
_LOOK = ToolSpec("look", "", {"type": "object", "properties": {"text": {"type": "string"}}})


def points(response: str) -> float:
    """A score that differs from response to response, between 0.1 and 1: what is scored is never a zero."""
    return (1 + sum(map(ord, response)) % 10) / 10


def reward(response: str, answer: str) -> float:
    """`points`, after a while."""
    time.sleep(SCORING_S)
    return points(response)


class AlwaysCalls:
    """Whatever the policy writes up to a vowel is a call of the first tool, which takes call_s seconds."""

    call_s = CALL_S
    template_tools = False
    final_stop_strings = _PAUSES
    turns_per_call = 1
    parallel_calls = False

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Sequence[Message]:
        return messages

    def stop_strings(self, written: str) -> tuple[str, ...]:
        return _PAUSES

    def parse(self, written: str, tools: Sequence[ToolSpec] = ()) -> Parsed:
        if not tools:
            return Final()
        (argument,) = list(tools[0].parameters["properties"])[:1]
        text = f"import time; time.sleep({self.call_s}); print({len(written)})" if argument == "code" else written
        return Calls((ToolCall(tools[0].name, {argument: text}),))

    def observation(self, results: Sequence[Message], written: str) -> str:
        return "".join(f"[{message.content}]" for message in results)

    def render(self, calls: Sequence[ToolCall]) -> str:
        return ""


class LookEnv:
    """Counts the characters that it is shown, in call_s seconds."""

    call_s = CALL_S

    def __init__(self, task: Task) -> None:
        self._task = task

    async def reset(self) -> Observation:
        return Observation(self._task.prompt, (_LOOK,))

    async def step(self, message: Message) -> StepResult:
        await asyncio.sleep(self.call_s)
        seen = str(len(str(message.tool_calls[0].arguments))) if message.tool_calls else "nothing"
        use = ToolUse(_LOOK.name, ToolStatus.SUCCESS, self.call_s)
        return StepResult((Message("tool", seen, tool=_LOOK.name),), tool_uses=(use,))

    async def close(self) -> None:
        """Holds nothing."""
