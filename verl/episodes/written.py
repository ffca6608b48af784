"""Responses that a program writes in place of the policy: gold responses, corrupted ones."""

from __future__ import annotations

from verl.errors import ConfigError
from verl.formats.base import Calls, ToolCallFormat
from verl.formats.history import with_calls_written
from verl.formats.plain import PLAIN, PlainFormat
from verl.formats.response import parsed_response
from verl.formats.toolrl_text import THINK, THINK_END
from verl.types import Completion, FinishReason, Message, Outcome, StopReason, Task, Trajectory, Turn


def written_response(response: str | Message, tool_call_format: ToolCallFormat) -> str:
    """The text of a response. Raises ConfigError for a message with calls if the format has none."""
    if isinstance(response, str):
        return response
    if response.tool_calls and isinstance(tool_call_format, PlainFormat):
        raise ConfigError(
            "the reward compares calls, so it needs the format that they are written in: env.tool_call_format, or "
            "--format in `toolrl lab`"
        )
    (message,) = with_calls_written(tool_call_format, [response])
    if getattr(tool_call_format, "needs_thought", False) and THINK not in message.content:
        return f"{THINK} I know what to do. {THINK_END}\n{message.content}"
    return message.content


def as_trajectory(task: Task, response: str | Message, tool_call_format: ToolCallFormat = PLAIN) -> Trajectory:
    """A finished single-turn episode in which the policy wrote `response`."""
    text = written_response(response, tool_call_format)
    parsed = tool_call_format.parse(text, task.tools)
    message = Message("assistant", text, tool_calls=parsed.calls if isinstance(parsed, Calls) else ())
    completion = Completion(token_ids=(), logprobs=(), finish_reason=FinishReason.STOP, weight_version=0)
    turn = Turn((), completion, message, parsed=parsed_response(tool_call_format, text, parsed))
    return Trajectory(task, index=0, turns=(turn,), stop_reason=StopReason.STOP, outcome=Outcome.SCORED)
