"""The environment's own verdict as the reward: for environments that compare states, where no text tells."""

from __future__ import annotations

from verl.types import Score, Task, Trajectory


class EnvReward:
    """What `StepResult.score` said last; 0 for an episode that ended before the environment could judge it."""

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        return trajectory.score or Score(0.0, {"unfinished": 1.0})
