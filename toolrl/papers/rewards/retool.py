r"""ReTool's reward (arXiv 2504.11536): +1 if the boxed answer is right, else -1; code itself earns nothing.

`shaped` is the reward shaping of veRL's recipe: every tool round reduces the penalty of a wrong answer, up to -0.6:
    min(-0.6, -1 + 0.1 * rounds)        rounds = (num_turns - 2) / 2 in veRL's count of turns
"""

from dataclasses import dataclass

from toolrl.reward_score.math import BoxLab, boxed, math_correct
from verl.types import Score, Task, Trajectory
from verl.utils.reward_score.base import written


@dataclass(frozen=True)
class RetoolReward(BoxLab):
    """Option `shaped`: veRL's reward shaping."""

    shaped: bool = False

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        correct = math_correct(written(trajectory), task.answer)
        rounds = sum(1 for turn in trajectory.turns if turn.responses)
        wrong = min(-0.6, -1.0 + 0.1 * rounds) if self.shaped else -1.0
        return Score(1.0 if correct else wrong, {"correct": float(correct)})

    def gold(self, task: Task, step: int) -> str:
        return f"<answer>\n{boxed(task.answer)}\n</answer>"
