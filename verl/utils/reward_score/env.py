"""The environment's own verdict as the reward: for environments that compare states, where no text tells."""

from __future__ import annotations

from verl.errors import ConfigError
from verl.types import Score, Task, Trajectory


class EnvReward:
    """The environment's verdict at the end (`judge`). Raises ConfigError for an environment that does not judge."""

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        if trajectory.score is None:
            raise ConfigError(
                "reward env needs an environment that judges: one with `async judge()` (verl/envs/base.py)"
            )
        return trajectory.score
