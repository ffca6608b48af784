r"""ZeroTIR's reward (arXiv 2505.07773): 1 for a right box in a response of good form that ended by itself, else 0.

The prompt opens the thought, so a response in good form is  .. </think> .. <answer> .. \boxed{} .. </answer>, each of
these tags once, and at most five words after it (tokens in the published code).

With `format_penalties` bad form costs as published: no answer block -3, no box in it -2, a tag missing or repeated -1,
a long tail -0.5. The published form with tools adds 0.5 for the tail; its twin without tools subtracts it, as here.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl.algorithms.overlong import Overlong
from verl.errors import ConfigError
from verl.types import FinishReason, Score, Task, Trajectory
from verl.utils.reward_score.base import Mutation, as_mutations, written
from verl.utils.reward_score.math import boxed, corrupted_boxes, last_box, math_correct
from verl.utils.reward_score.search_r1 import last_answer
from verl.utils.reward_score.torl import FAILED

_MAX_TAIL_WORDS = 5


def format_penalty(response: str, loose: bool = False) -> float:
    """0 in good form, else what the worst fault costs. `loose` lets the thought go unclosed or be closed twice."""
    answer = last_answer(response)
    if answer is None:
        return -3.0
    if last_box(answer) is None:
        return -2.0
    tags = ("<answer>", "</answer>") if loose else ("</think>", "<answer>", "</answer>")
    if any(response.count(tag) != 1 for tag in tags):
        return -1.0
    return -0.5 if len(response.rpartition("</answer>")[2].split()) > _MAX_TAIL_WORDS else 0.0


@dataclass(frozen=True)
class ZeroTirReward:
    """Options, all off by default as published.

    format_penalties: bad form costs; loose: the thought is not checked
    failing_code_penalty: off a right answer for which more than 90 % of several executions failed (0.1 as published)
    longest, margin: tokens of DAPO's soft punishment of long responses
    """

    format_penalties: bool = False
    loose: bool = False
    failing_code_penalty: float = 0.0
    longest: int | None = None
    margin: int = 512

    def __post_init__(self) -> None:
        if self.margin < 1:
            raise ConfigError(f"reward option margin must be at least 1, got {self.margin!r}")

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        response = written(trajectory)
        penalty = format_penalty(response, self.loose)
        finished = bool(trajectory.turns) and trajectory.turns[-1].completion.finish_reason is FinishReason.STOP
        correct = penalty == 0.0 and finished and math_correct(response, task.answer)
        parts = {"correct": float(correct), "format": penalty if self.format_penalties else 0.0}
        if correct and self._mostly_fails(trajectory):
            parts["failing_code"] = -self.failing_code_penalty
        if self.longest is not None:
            length = sum(len(turn.completion.token_ids) for turn in trajectory.turns)
            parts["overlong"] = Overlong(self.longest, self.margin).penalty(length)
        return Score(sum(parts.values()), parts)

    def _mostly_fails(self, trajectory: Trajectory) -> bool:
        uses = trajectory.tool_uses
        return len(uses) > 1 and sum(use.status in FAILED for use in uses) > 0.9 * len(uses)

    def maximum(self, task: Task, step: int) -> float:
        return 1.0

    def gold(self, task: Task, step: int) -> str:
        return f"I know this.</think> <answer>{boxed(task.answer)}</answer>"

    def mutations(self, task: Task, step: int) -> list[Mutation]:
        response = self.gold(task, step)
        spoiled = {
            name: f"I know this.</think> <answer>{text}</answer>"
            for name, text in corrupted_boxes(task.answer).items()
            if name != "box unclosed"
        }
        spoiled["answer unclosed"] = response.removesuffix("</answer>")
        spoiled["two answers"] = f"{response} <answer>{boxed(task.answer)}</answer>"
        spoiled["long tail"] = f"{response} and here I go on for more than five words"
        if not self.loose:
            spoiled["thought unclosed"] = response.replace("</think>", "")
        return as_mutations(spoiled)
