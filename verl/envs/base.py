"""What an environment is: messages in, messages out. Tokens, masks, templates, time limits and budgets are not its own.

A new environment is one file with one class: made for a task, `reset` says how the episode opens, `step` answers what
the policy said, and `judge`, where the environment scores its own state, is asked once at the end. An environment
never raises for what a policy does; verl.errors.ServiceDownError means that something it needs is broken, and ends the
episode as an infrastructure fault.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from verl.types import Message, Score, Task, ToolSpec, ToolUse


@dataclass(frozen=True, slots=True)
class Observation:
    """How an episode opens."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the environment answers; nothing is put before the policy once it is done."""

    messages: tuple[Message, ...] = ()
    done: bool = False
    tool_uses: tuple[ToolUse, ...] = ()
    tools: tuple[ToolSpec, ...] = ()  # that are there from now on, in addition
    reward: float | None = None  # for this turn, besides what the episode is worth; not every algorithm takes it


class Env(Protocol):
    """One episode of one task."""

    async def reset(self) -> Observation:
        """The opening; the same for every episode of a task."""

    async def step(self, message: Message) -> StepResult:
        """What comes of the policy's message. Its tool calls are in `message.tool_calls`."""

    async def close(self) -> None:
        """Give back what the episode holds. Called once, however it ended."""


@runtime_checkable
class Judge(Protocol):
    """An environment that scores the state that an episode has left; the episodes of others are left to a reward."""

    async def judge(self) -> Score | None:
        """The score of the state as it is. Asked once, before `close`, at every end of an episode: the policy answered,
        `step` said that it is done, or tokens, turns, calls or time were used up. What keeps it from a verdict is an
        infrastructure fault. None leaves the episode to a reward, too.
        """


class EnvFactory(Protocol):
    """Makes the environments of a run and owns what they share (a sandbox, an index, a connection)."""

    def __call__(self, task: Task) -> Env:
        """A fresh environment for one episode of the task."""

    async def close(self) -> None:
        """End what is shared."""


@runtime_checkable
class TaskChecker(Protocol):
    """A factory, or a class of environments, that knows its own tasks; others are told before anything is started."""

    def check_task(self, task: Task) -> None:
        """Raises DataError for a task that it cannot play."""


@runtime_checkable
class HasInitialObservation(Protocol):
    """A factory, or a class of environments, that knows how the episodes of a task open without starting one."""

    def initial_observation(self, task: Task) -> Observation:
        """What `reset` will give, as far as it is known before."""
