"""Selects the reward of each task (the run's, or the one that its row names) and applies its reward shaping."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from verl.errors import ConfigError
from verl.formats.toolrl_text import RESPONSE, THINK, TOOL_CALL
from verl.types import Score, Task, Trajectory, TrajectoryGroup
from verl.utils.reward_score.base import (
    NONE,
    REWARDS,
    GroupReward,
    LabReward,
    Reward,
    build_reward,
    named_reward,
    no_gold,
    reads_step,
)
from verl.utils.reward_score.weighted import SUM, WeightedSum
from verl.verl_compat.published import AUTO, source_of

_RLLA, _CALLS = "rlla", "calls"  # rewards of auto; they have the same options
_SHOWN = 80  # characters of a gold answer


@dataclass(frozen=True)
class Rewards:
    """The run's reward with its options, and those that rows name, with default options."""

    default: Reward
    name: str = ""  # name of the default
    for_gold: Reward | None = None  # with name auto: of tasks with a gold turn
    options: Mapping[str, Any] = field(default_factory=dict)  # options of the default reward

    def of(self, task: Task) -> Reward:
        """The task's reward. Raises ConfigError for an unknown name or source, DataError for an unknown version."""
        if task.reward is not None:
            return self._named(task.reward)
        return self.default if self.name != AUTO else self._of_row(task)

    def _named(self, name: str) -> Reward:
        """The run's own reward, or one of its sum, where the name is theirs."""
        if name == self.name:
            return self.default
        terms = self.default.terms if isinstance(self.default, WeightedSum) else ()
        return next((term.reward for term in terms if term.name == name), None) or named_reward(name)

    def names(self, task: Task) -> tuple[str, ...]:
        """The names of the task's reward, or of all in a sum. Raises like `of`."""
        reward = self.of(task)
        if isinstance(reward, WeightedSum):
            return reward.names
        return (task.reward or (_choice(task)[0] if self.name == AUTO else self.name),)

    def choice(self, task: Task) -> str:
        """The names of the task's reward; with name auto, also its options and what selected it."""
        names = ", ".join(self.names(task))
        if task.reward is not None or self.name != AUTO or task.gold is not None:
            return names
        _, options = _choice(task)
        given = "".join(f" {key}={value}" for key, value in options.items())
        known = source_of(task.data_source) is not None
        return f"{names}{given} (by {f'data_source {task.data_source}' if known else 'the tags of the gold'})"

    def _of_row(self, task: Task) -> Reward:
        """With name auto: the reward of tasks like this one."""
        name, options = _choice(task)
        if name == _RLLA:
            return self.default
        if name == _CALLS and self.for_gold is not None:
            return self.for_gold
        if self.options:
            given = ", ".join(self.options)
            raise ConfigError(
                f"reward.options ({given}) are of reward.name={_RLLA}, but {task.id}, with data_source "
                f"{task.data_source!r}, is scored by {name}; set reward.name={name}, or leave the options out"
            )
        return _published(name, json.dumps(dict(options), sort_keys=True))

    def for_tasks(self, tasks: Iterable[Task]) -> list[Reward]:
        """The distinct rewards of these tasks, the run's own first."""
        return list({id(reward): reward for reward in (self.default, *map(self.of, tasks))}.values())

    def require_gold(self, tasks: Iterable[Task]) -> Iterator[Task]:
        """The tasks. Raises DataError for the first one without gold, with which name auto compares responses."""
        for task in tasks:
            if self.lacks_gold(task):
                raise no_gold().of_row(task.id)
            yield task

    def lacks_gold(self, task: Task) -> bool:
        """Whether name auto selects a reward that compares responses with the task's gold, and it has none."""
        return self.name == AUTO and task.reward is None and task.gold is None and not task.answer

    def reads_step(self, task: Task) -> bool:
        """Whether the task's scores may depend on the step."""
        return reads_step(self.of(task))

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        return self.of(task).score(trajectory, task, step)

    def maximum(self, task: Task, step: int) -> float | None:
        """The highest possible total for the task; None if its reward does not define it."""
        reward = self.of(task)
        return reward.maximum(task, step) if isinstance(reward, LabReward) else None

    def shaped(self, group: TrajectoryGroup, states: Mapping[str, Any]) -> tuple[TrajectoryGroup, Mapping[str, Any]]:
        """Reward shaping: (the group with the rewards to train on, new states by reward name); see `GroupReward`."""
        reward = self.of(group.task)
        if not isinstance(reward, GroupReward) or not group.trajectories:
            return group, states
        name = group.task.reward or self.name
        rewards, state = reward.shape(group, states.get(name, {}))
        return replace(group, rewards=rewards), {**states, name: state}


def build_rewards(name: str, options: Mapping[str, Any] | None = None) -> Rewards:
    """The rewards of a run whose own is named `name`. Raises ConfigError like `build_reward`."""
    for_gold = build_reward(_CALLS, options) if name == AUTO else None
    return Rewards(build_reward(name, options), name, for_gold, options or {})


def _choice(task: Task) -> tuple[str, Mapping[str, Any]]:
    """(name, options) of the reward with name auto: by the gold turn, the source, or the tags of ToolRL's format.

    Raises ConfigError for a source without a reward, for an unknown one, and for one that the gold contradicts: any
    guess would train something else.
    """
    if task.gold is not None:
        return _CALLS, {}
    source = source_of(task.data_source)
    if source is None:
        if not task.answer or any(tag in task.answer for tag in (THINK, TOOL_CALL, RESPONSE)):
            return _RLLA, {}
        problem = f"names no reward, and the gold is not in ToolRL's format ({task.answer[:_SHOWN]!r})"
    elif source.reward is None:
        problem = f"has no reward here: {source.why}"
    elif source.reward != _RLLA and _is_toolrl(task.answer):
        raise ConfigError(
            f"{task.id}: data_source {task.data_source!r} selects the reward {source.reward}, but the gold is in "
            f"ToolRL's format ({task.answer.strip()[:_SHOWN]!r}). Set reward.name={_RLLA} to score such responses, or "
            f"reward.name={source.reward} if that is meant; rows may differ in a column `reward`"
        )
    else:
        return source.reward, source.options_of(task.extra)
    names = ", ".join(sorted(REWARDS.keys() - {AUTO, SUM, NONE}))
    raise ConfigError(
        f"{task.id}: data_source {task.data_source!r} {problem}. Set reward.name to one of {names}, or to "
        "path/to/file.py:function (docs/reward.md); docs/migration.md lists the sources that select one"
    )


def _is_toolrl(answer: str) -> bool:
    """Whether it begins with a thought, and makes a call or answers; an answer may quote a tag."""
    return answer.lstrip().startswith(THINK) and (TOOL_CALL in answer or RESPONSE in answer)


@cache
def _published(name: str, options: str) -> Reward:
    """options: JSON"""
    return build_reward(name, json.loads(options))
