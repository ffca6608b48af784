r"""ToRL's reward (arXiv 2503.23383): +1 if the last box contains the right answer, else -1.

The published code applies its executability penalty to responses without any code and checks only the last round; here,
as in the paper, it applies to responses in which code was run and failed. Off by default, as in the paper's main runs.
"""

from dataclasses import dataclass

from toolrl.reward_score.answers import FAILED
from toolrl.reward_score.math import BoxLab, last_box, math_correct
from verl.types import Score, Task, Trajectory
from verl.utils.reward_score.base import written


@dataclass(frozen=True)
class TorlReward(BoxLab):
    """Options: penalty of a failed execution (0.5 in the paper), reward of a wrong box (-0.5 in the code)."""

    executability_penalty: float = 0.0
    wrong_box: float = -1.0

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        response = written(trajectory)
        correct = math_correct(response, task.answer)
        answer = 1.0 if correct else -1.0 if last_box(response) is None else self.wrong_box
        failed = any(use.status in FAILED for use in trajectory.tool_uses)
        penalty = -self.executability_penalty if failed else 0.0
        return Score(answer + penalty, {"correct": float(correct), "executability": penalty})
