"""The environment's own verdict as the reward, e.g. for environments that compare final states."""

from verl.errors import ConfigError
from verl.types import Score, Task, Trajectory


class EnvReward:
    """The environment's final verdict (`judge`). Raises ConfigError if the environment does not judge."""

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        if trajectory.score is None:
            raise ConfigError("reward env needs an environment that judges: with `async judge()` (verl/envs/base.py)")
        return trajectory.score
