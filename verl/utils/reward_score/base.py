"""The reward protocols, reward shaping per group, and how a name or a plain function becomes a reward."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from inspect import Parameter, isawaitable, signature
from typing import Any, ClassVar, Protocol, runtime_checkable

from verl.config.published import AUTO
from verl.errors import ConfigError, DataError
from verl.registry import check_options, resolve
from verl.text import shortened
from verl.types import Message, Score, Task, Trajectory, TrajectoryGroup

_SHOWN = 200  # characters of a value that is no score
REWARDS: Mapping[str, str] = {
    AUTO: "verl.utils.reward_score.rlla:RllaReward",  # of ToolRL's rows; of others: verl/scoring/rewards.py
    "rlla": "verl.utils.reward_score.rlla:RllaReward",
    "sum": "verl.utils.reward_score.weighted:WeightedSum",
    "calls": "verl.utils.reward_score.calls:CallsReward",
    "env": "verl.utils.reward_score.base:EnvReward",
    "torl": "verl.kit.papers.rewards.torl:TorlReward",
    "retool": "verl.kit.papers.rewards.retool:RetoolReward",
    "otc_ppo": "verl.kit.papers.rewards.otc:OtcPpoReward",
    "otc_grpo": "verl.kit.papers.rewards.otc:OtcGrpoReward",
    "tool_n1": "verl.kit.papers.rewards.tool_n1:ToolN1Reward",
    "artist_math": "verl.kit.papers.rewards.artist:ArtistMathReward",
    "artist_tools": "verl.kit.papers.rewards.artist:ArtistToolsReward",
    "search_r1": "verl.kit.papers.rewards.search_r1:SearchR1Reward",
    "zerotir": "verl.kit.papers.rewards.zerotir:ZeroTirReward",
    "bfcl": "verl.kit.bfcl.reward:BfclReward",
    "api_bank": "verl.kit.api_bank.reward:ApiBankReward",
    "math": "verl.utils.reward_score.math:MathReward",
    "gsm8k": "verl.utils.reward_score.gsm8k:Gsm8kReward",
    "math_dapo": "verl.utils.reward_score.math_dapo:MathDapoReward",
    "qa": "verl.kit.qa.reward:QaReward",
}


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


def written(trajectory: Trajectory, observed: str = "\n") -> str:
    """The text of all assistant turns, with `observed` in place of every observation."""
    return "".join(turn.message.content + (observed if turn.responses else "") for turn in trajectory.turns)


@dataclass(frozen=True, slots=True)
class FunctionReward:
    """A function, plain or async, that returns a number, or a mapping of numbers whose "score" is the total.

    It takes `(response, answer)`, or veRL's (data_source, solution_str, ground_truth, extra_info), or TRL's lists
    (prompts, completions, and columns: extra_info's, answer), here of one row, to return a list of one number.
    """

    reads_step: ClassVar[bool] = False
    function: Callable[..., Any]

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        found = self._call(trajectory.response, task)
        if isawaitable(found):
            found = asyncio.run(_awaited(found))
        if "completions" in signature(self.function).parameters:
            if not isinstance(found, Iterable) or len(listed := list(found)) != 1:
                raise TypeError(
                    f"{self._name} returned {shortened(repr(found), _SHOWN)}; expected a list of one number"
                )
            (found,) = listed
        return as_score(found, self._name)

    def check_task(self, task: Task) -> None:
        """Raises DataError if the row lacks a column that a function of TRL's form names."""
        if "completions" in signature(self.function).parameters:
            try:
                signature(self.function).bind(**self._columns("", task))
            except TypeError as error:
                has = f"one of {', '.join(('prompts', 'completions', 'answer', *task.extra))}"
                hint = "Add it to the rows; TRL's completion_ids, trainer_state and environments do not exist here"
                raise DataError(f"reward {self._name}: {error}", has, hint) from error

    @property
    def _name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def _call(self, response: str, task: Task) -> Any:
        names = signature(self.function).parameters
        if "solution_str" in names:
            texts = {"solution_str": response, "ground_truth": task.answer}
            return self.function(data_source=task.data_source, **texts, extra_info=dict(task.extra))
        if "completions" not in names:
            return self.function(response, task.answer)
        return self.function(**self._columns(response, task))

    def _columns(self, response: str, task: Task) -> dict[str, Any]:
        """Those of TRL's lists that the function takes."""
        names = signature(self.function).parameters
        prompt = [{"role": message.role, "content": message.content} for message in task.prompt]
        columns = {"answer": task.answer, **task.extra, "prompts": prompt}
        columns["completions"] = [{"role": "assistant", "content": response}]
        takes_all = any(each.kind is Parameter.VAR_KEYWORD for each in names.values())
        return {key: [value] for key, value in columns.items() if takes_all or key in names}


def as_score(found: Any, made_by: str) -> Score:
    """The score of a finite number, or of a mapping of these whose "score" is the total, the others its parts.

    made_by: the function's name, for the error. Raises TypeError for anything else.
    """
    try:
        given = found if isinstance(found, Mapping) else {"score": found}
        parts = {name: _number(value) for name, value in given.items()}
        return Score(parts.pop("score"), parts)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:  # RuntimeError: of a tensor
        expected = "a finite number, or a dict of finite numbers with 'score', the total"
        raise TypeError(f"{made_by} returned {shortened(repr(found), _SHOWN)}; expected {expected}") from error


def _number(value: Any) -> float:
    """A finite number; a text is none, even if it reads as one."""
    if isinstance(value, str | bytes) or not math.isfinite(number := float(value)):
        raise ValueError(value)
    return number


async def _awaited(found: Awaitable[Any]) -> Any:
    return await found


class EnvReward:
    """The environment's final verdict (`judge`). Raises ConfigError if there is none."""

    reads_step: ClassVar[bool] = False

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        if trajectory.score is None:
            absent = "the environment does not judge (`async judge()`, verl/envs/base.py)"
            raise ConfigError(f"reward env: there is no verdict; {absent}, or its agent ended without a reward")
        return trajectory.score


def build_reward(name: str, options: Mapping[str, Any] | None = None) -> Reward:
    """The reward `name`: built-in, `module:Class` (made with `options`) or a function. Raises ConfigError."""
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
    if options:
        raise ConfigError(f"reward {name!r} is a plain function and takes no options, but got {sorted(options)}")
    _check_parameters(name, found)
    return FunctionReward(found)


def _check_parameters(name: str, function: Callable[..., Any]) -> None:
    """Raises ConfigError for a function that `FunctionReward` cannot call; TRL's columns are those of the rows."""
    try:
        parameters = signature(function)
        if "solution_str" in parameters.parameters:
            parameters.bind(data_source="", solution_str="", ground_truth="", extra_info={})
        elif "completions" not in parameters.parameters:
            parameters.bind("", "")
    except (TypeError, ValueError) as error:
        forms = "(response, answer), (data_source, solution_str, ground_truth, extra_info) or (completions, **columns)"
        raise ConfigError(f"reward {name!r} is a function of other parameters than {forms}: {error}") from error


@cache
def named_reward(name: str) -> Reward:
    """The reward that rows select by this name, built once with default options. Raises ConfigError."""
    return build_reward(name)
