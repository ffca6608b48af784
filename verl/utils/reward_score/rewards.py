"""Which reward judges a task: the run's, or the one that its row names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from verl.types import Score, Task, Trajectory, TrajectoryGroup
from verl.utils.reward_score.base import GroupReward, LabReward, Reward, build_reward


@cache
def named_reward(name: str) -> Reward:
    """The reward that rows call by this name, made once, with its default options. Raises ConfigError."""
    return build_reward(name)


@dataclass(frozen=True)
class Rewards:
    """The rewards of a run: a reward itself, which leaves each task to its own.

    Rows choose by name alone: what they name has its default options, but the run's own reward has the run's.
    """

    default: Reward
    name: str = ""  # of the default

    def of(self, task: Task) -> Reward:
        """The task's reward. Raises ConfigError for an unknown name."""
        return self.default if task.reward in (None, self.name) else named_reward(task.reward)

    def all_of(self, tasks: Iterable[Task]) -> list[Reward]:
        """Each reward that judges any of the tasks once, the run's own first."""
        return list({id(reward): reward for reward in (self.default, *map(self.of, tasks))}.values())

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        """The score by the task's reward."""
        return self.of(task).score(trajectory, task, step)

    def maximum(self, task: Task, step: int) -> float | None:
        """The highest total that any response to the task can get; None where its reward does not know."""
        reward = self.of(task)
        return reward.maximum(task, step) if isinstance(reward, LabReward) else None

    def shaped(self, group: TrajectoryGroup, states: Mapping[str, Any]) -> tuple[TrajectoryGroup, Mapping[str, Any]]:
        """(the group with the rewards to train on, the new states): what `GroupReward.shape` does, by reward's name."""
        reward = self.of(group.task)
        if not isinstance(reward, GroupReward) or not group.trajectories:
            return group, states
        name = group.task.reward or self.name
        rewards, state = reward.shape(group, states.get(name, {}))
        return replace(group, rewards=rewards), {**states, name: state}


def build_rewards(name: str, options: Mapping[str, Any] | None = None) -> Rewards:
    """The rewards of a run whose own is called `name`. Raises ConfigError as `build_reward` does."""
    return Rewards(build_reward(name, options), name)
