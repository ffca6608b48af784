"""TRL's reward functions, (completions, ..): lists of one row, and any of its columns."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

from verl.formats.openai import as_openai
from verl.formats.toolrl_text import THINK, THINK_END
from verl.types import Message, Task, ToolCall, Trajectory, Turn
from verl.utils.reward_score.functions import Form, Log, rounds, row_columns


@dataclass(frozen=True, slots=True)
class TrainerState:
    """TRL's `trainer_state`, as far as a score can follow it. global_step: finished updates"""

    global_step: int


def _columns(trajectory: Trajectory, task: Task, step: int, log: Log) -> dict[str, Any]:
    """What TRL 1.16's trainer passes, as lists of one row."""
    messages = [as_openai(message) for message in trajectory.prompt]
    lists = {
        **row_columns(task),
        "prompts": trajectory.prompt[-1].content if task.text_prompt else messages,
        "completions": trajectory.decoded if task.text_prompt else _conversation(trajectory),
        "completion_ids": trajectory.response_ids,
    }
    columns: dict[str, Any] = {name: [value] for name, value in lists.items()}
    if trajectory.environment:
        columns["environments"] = [pickle.loads(trajectory.environment)]  # noqa: S301  of this run's own process
    return {
        **columns,
        "trainer_state": TrainerState(max(step - 1, 0)),
        "log_extra": log.column,
        "log_metric": log.metric,
    }


def _conversation(trajectory: Trajectory) -> list[dict[str, Any]]:
    """The messages after the prompt. With tools, TRL takes thoughts and calls out of the policy's text."""
    turns, made = trajectory.turns, []
    has_tools = trajectory.tools or any(turn.message.tool_calls for turn in turns)
    for turn, observed in rounds(trajectory):
        text = trajectory.decoded if len(turns) == 1 else turn.message.content
        made += [_written(turn) if has_tools else {"role": "assistant", "content": text}, *map(_observed, observed)]
    return made


def _written(turn: Turn) -> dict[str, Any]:
    """The policy's message: its text, thought and calls; its text alone if a call in it cannot be parsed."""
    text, calls = turn.message.content, turn.message.tool_calls
    if turn.parsed is not None and turn.parsed.error is not None:
        return {"role": "assistant", "content": text}
    if calls and turn.parsed is not None:
        text = turn.parsed.content
    made: dict[str, Any] = {"role": "assistant"}
    if text.lstrip().startswith(THINK):
        thought, _, text = text.lstrip().removeprefix(THINK).partition(THINK_END)
        if thought.strip():
            made["reasoning_content"] = thought.strip()
        text = text.lstrip()
    made["content"] = text.rstrip() if calls else text
    return {**made, "tool_calls": [_called(call) for call in calls]} if calls else made


def _called(call: ToolCall) -> dict[str, Any]:
    return {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}


def _observed(message: Message) -> dict[str, Any]:
    named = {"name": message.tool or ""} if message.role == "tool" else {}
    return {"role": message.role, **named, "content": message.content}


TRL = Form(
    parameter="completions",
    arguments=_columns,
    names=("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"),
    optional=True,
    of_lists=True,
    abstains=True,
)
