"""Playing environments by hand, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from verl.envs.base import Env, EnvFactory, Judge, StepResult
from verl.types import Message, Score, Task, ToolCall


def call(name: str, **arguments: Any) -> Message:
    """A message of the policy that calls one tool."""
    return calls(ToolCall(name, arguments))


def calls(*made: ToolCall) -> Message:
    """A message of the policy that calls tools."""
    return Message("assistant", "", made)


def respond(text: str = "Done.") -> Message:
    """A message of the policy without calls."""
    return Message("assistant", text)


class Played(list[StepResult]):
    """What the steps of an episode gave, and the environment's verdict after them, where it judges."""

    score: Score | None = None


async def play(env: Env, messages: Sequence[Message]) -> Played:
    """One episode from its opening to its close."""
    await env.reset()
    results = Played([await env.step(message) for message in messages])
    results.score = await env.judge() if isinstance(env, Judge) else None
    await env.close()
    return results


def run(factory: EnvFactory, task: Task, *messages: Message) -> Played:
    """One episode of a factory's environment."""
    return asyncio.run(play(factory(task), messages))
