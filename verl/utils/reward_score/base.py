"""The reward protocols, reward shaping per group, and how a name or a plain function becomes a reward."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Protocol, runtime_checkable

from verl import plugins
from verl.errors import ConfigError, DataError
from verl.registry import check_options, resolve
from verl.types import Message, Score, Task, Trajectory, TrajectoryGroup
from verl.utils.reward_score.functions import FunctionReward, check_function
from verl.verl_compat.published import AUTO

NONE = "none"
REWARDS: Mapping[str, str] = {
    AUTO: "verl.utils.reward_score.rlla:RllaReward",  # ToolRL's rows; for others: verl/scoring/rewards.py
    "rlla": "verl.utils.reward_score.rlla:RllaReward",
    "sum": "verl.utils.reward_score.weighted:WeightedSum",
    "calls": "verl.utils.reward_score.calls:CallsReward",
    "env": "verl.utils.reward_score.base:EnvReward",
    NONE: "verl.utils.reward_score.base:NoReward",
    **plugins.REWARDS,
}
FIRST_STEP = 1  # first step of a schedule; gold responses are tried at it


class Reward(Protocol):
    """Scores one finished trajectory.

    step: for rewards that follow a schedule: the number of the update that trains the trajectory, counted from 1; in a
        validation, of the update before it, 0 before the first
    reads_step (optional attribute): False if the score does not depend on the step. Otherwise a trajectory that waits
        for a later update (rollout.max_staleness) is scored again
    """

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score: ...


def reads_step(reward: Reward) -> bool:
    return getattr(reward, "reads_step", True)


@runtime_checkable
class GroupReward(Reward, Protocol):
    """A reward with reward shaping: compares the rollouts of a prompt, and may keep state per prompt."""

    def shape(self, group: TrajectoryGroup, state: Mapping[str, Any]) -> tuple[tuple[float, ...], Mapping[str, Any]]:
        """Reward shaping: ([G] rewards to train on, new state). Pure: `state` is not modified.

        The state is plain JSON, empty in a new run and saved in checkpoints. Validation uses unshaped rewards.
        """


@runtime_checkable
class TaskCheckingReward(Reward, Protocol):
    """A reward that checks its tasks when they are loaded.

    reads_calls (optional attribute): it compares the calls that the tool-call format parsed
    """

    def check_task(self, task: Task) -> None:
        """Raises DataError for a task that it cannot score."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """A named corruption of a good response, which a sound reward must score below the maximum.

    text: the response, or a message with calls, which the lab renders in the tool-call format
    """

    name: str
    text: str | Message


def as_mutations(corrupted: Mapping[str, str]) -> list[Mutation]:
    return [Mutation(name, text) for name, text in corrupted.items()]


@runtime_checkable
class LabReward(Reward, Protocol):
    """A reward that can be checked on data before training (`toolrl lab`)."""

    def maximum(self, task: Task, step: int) -> float:
        """The highest possible total for this task at this step."""

    def gold(self, task: Task, step: int) -> str | Message:
        """A response that deserves the maximum; a message is rendered in the tool-call format."""

    def mutations(self, task: Task, step: int) -> list[Mutation]:
        """Responses that do not deserve it."""


class AtMostOne:
    """A reward whose total is at most 1, at every step."""

    reads_step: ClassVar[bool] = False

    def maximum(self, task: Task, step: int) -> float:
        return 1.0


def written(trajectory: Trajectory, observed: str = "\n") -> str:
    """The text of all assistant turns, with `observed` in place of every observation."""
    return "".join(turn.message.content + (observed if turn.responses else "") for turn in trajectory.turns)


class EnvReward:
    """The environment's final verdict (`judge`). Raises ConfigError if there is none."""

    reads_step: ClassVar[bool] = False

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        if trajectory.score is None:
            absent = "the environment does not judge (`async judge()`, verl/envs/base.py)"
            raise ConfigError(f"reward env: there is no verdict; {absent}, or its agent ended without a reward")
        return trajectory.score


class NoReward:
    """0 for every response. `toolrl generate` takes it for rows without a gold."""

    reads_step: ClassVar[bool] = False

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        return Score(0.0, {})


def no_gold() -> DataError:
    """Of a task whose reward would compare responses with an empty answer."""
    hint = "Add one, or set reward.name to a reward that needs none"
    return DataError("has no gold, neither a last assistant turn nor reward_model.ground_truth", hint=hint)


def build_reward(name: str, options: Mapping[str, Any] | None = None) -> Reward:
    """The reward `name`: built-in, `module:Class` (made with `options`) or a function, which gets them as arguments.

    Raises ConfigError.
    """
    found = resolve("reward", name, REWARDS)
    options = dict(options or {})
    if isinstance(found, type):
        if not hasattr(found, "score"):
            raise ConfigError(f"reward {name!r} is a class without `score(trajectory, task, step)`")
        check_options("reward", name, found, options)
        reward: Reward = found(**options)
        return reward
    if not callable(found):
        raise ConfigError(f"reward {name!r} must be a class or a function, not an object of {type(found).__name__}")
    check_function(name, found, options)
    return FunctionReward(found, options)


@cache
def named_reward(name: str) -> Reward:
    """The reward that rows select by this name, built once with default options. Raises ConfigError."""
    return build_reward(name)
