"""The environment interface: messages in, messages out. Tokens, masks, templates and limits are handled elsewhere.

A new environment is one file with one class, built from a task: `reset` returns the initial observation, `step` takes
the policy's message and returns the next observation, and the optional `judge` scores the final state once. An
environment never raises because of the policy's actions; verl.errors.ServiceDownError means that a dependency is down
and ends the episode as an infrastructure fault.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from verl.types import Message, Score, Task, ToolSpec, ToolUse


@dataclass(frozen=True, slots=True)
class Observation:
    """The initial observation of an episode."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step; after `done` the policy gets no further observation."""

    messages: tuple[Message, ...] = ()
    done: bool = False
    tool_uses: tuple[ToolUse, ...] = ()
    tools: tuple[ToolSpec, ...] = ()  # tools added from this turn on
    reward: float | None = None  # turn-level reward, in addition to the episode's; not every algorithm uses it


class Env(Protocol):
    """One episode of one task."""

    async def reset(self) -> Observation:
        """The initial observation; the same for every episode of a task."""

    async def step(self, message: Message) -> StepResult:
        """Apply the policy's message. Its tool calls are in `message.tool_calls`."""

    async def close(self) -> None:
        """Release the episode's resources. Called exactly once, on every outcome. By default a no-op."""
        return


@runtime_checkable
class Judge(Protocol):
    """An environment that scores its own final state; all others are scored by a reward function."""

    async def judge(self) -> Score | None:
        """The score of the current state. Called once, before `close`, on every outcome: a final answer, `done` from
        `step`, or a limit on tokens, turns, calls or time. Failing to reach a verdict is an infrastructure fault.
        None: the reward function scores the episode.
        """


@runtime_checkable
class HasSnapshot(Protocol):
    """An environment whose final state reward functions may read (TRL's `environments`)."""

    def snapshot(self) -> bytes:
        """The state at the end, pickled by cloudpickle; empty if it cannot be pickled. Called once, before `close`."""


class EnvFactory(Protocol):
    """Creates the environments of a run and owns their shared resources (a sandbox, an index, a connection)."""

    def __call__(self, task: Task) -> Env:
        """A fresh environment for one episode of the task."""

    async def close(self) -> None:
        """Release the shared resources. By default a no-op."""
        return


@runtime_checkable
class TaskChecker(Protocol):
    """A factory or environment class that validates its tasks before anything is started."""

    def check_task(self, task: Task) -> None:
        """Raises DataError for a task that it cannot run."""


@runtime_checkable
class HasInitialObservation(Protocol):
    """A factory or environment class that knows the initial observation of a task without starting an episode."""

    def initial_observation(self, task: Task) -> Observation:
        """The observation that `reset` will return, as far as it is known in advance."""
