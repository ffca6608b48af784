"""Selects the reward of each task (the run's, or the one that its row names) and applies its reward shaping."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from verl.errors import DataError
from verl.types import Score, Task, Trajectory, TrajectoryGroup
from verl.utils.reward_score.base import AUTO, GroupReward, LabReward, Reward, build_reward, named_reward, reads_step
from verl.utils.reward_score.weighted import WeightedSum

_RLLA, _CALLS = "rlla", "calls"  # of auto; they have the same options


@dataclass(frozen=True)
class Rewards:
    """The run's reward with its options, and those that rows name, with default options."""

    default: Reward
    name: str = ""  # name of the default
    for_gold: Reward | None = None  # of tasks with a gold turn and without a reward of their own, with name auto

    def of(self, task: Task) -> Reward:
        """The task's reward. Raises ConfigError for an unknown name."""
        if self.for_gold is not None and task.gold is not None and task.reward is None:
            return self.for_gold
        return self.default if task.reward in (None, self.name) else named_reward(task.reward)

    def names(self, task: Task) -> tuple[str, ...]:
        """The names of the task's reward, or of all in a sum."""
        if task.reward is None and self.name == AUTO:
            return (_RLLA if task.gold is None else _CALLS,)
        reward = self.of(task)
        return reward.names if isinstance(reward, WeightedSum) else (task.reward or self.name,)

    def all_of(self, tasks: Iterable[Task]) -> list[Reward]:
        """The distinct rewards of these tasks, the run's own first."""
        return list({id(reward): reward for reward in (self.default, *map(self.of, tasks))}.values())

    def checked(self, tasks: Iterable[Task]) -> Iterator[Task]:
        """The tasks. Raises DataError for the first one without gold, with which name auto compares responses."""
        for task in tasks:
            if self.name == AUTO and task.reward is None and task.gold is None and not task.answer:
                raise DataError(
                    "has no gold, neither a last assistant turn nor reward_model.ground_truth",
                    hint="Add one, or set reward.name to a reward that needs none",
                ).of_row(task.id)
            yield task

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
    return Rewards(build_reward(name, options), name, for_gold)
