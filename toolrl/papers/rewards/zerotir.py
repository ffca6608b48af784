r"""ZeroTIR's reward (arXiv 2505.07773): 1 for a right box in a well-formed response that ended by itself, else 0.

The prompt opens the thought, so a well-formed response is  .. </think> .. <answer> .. \boxed{} .. </answer>, with each
of these tags once, and a tail with a word count of at most 5 (tokens in the published code).

`format_penalties` as published: no answer block -3, no box in it -2, a tag missing or repeated -1, a long tail -0.5.
The published version with tools adds 0.5 for the tail; the one without tools subtracts it, as here.
"""

from dataclasses import dataclass

from toolrl.reward_score.answers import FAILED, last_answer
from toolrl.reward_score.math import boxed, corrupted_boxes, last_box, math_correct
from verl.algorithms.filters import num_written
from verl.algorithms.overlong import Overlong
from verl.errors import ConfigError
from verl.types import FinishReason, Score, Task, Trajectory
from verl.utils.reward_score.base import AtMostOne, Mutation, as_mutations, written

_MAX_TAIL_WORD_COUNT = 5


def format_penalty(response: str, loose: bool = False) -> float:
    """0 for a well-formed response, else the largest penalty. `loose`: the thought's closing tag is not checked."""
    answer = last_answer(response)
    if answer is None:
        return -3.0
    if last_box(answer) is None:
        return -2.0
    tags = ("<answer>", "</answer>") if loose else ("</think>", "<answer>", "</answer>")
    if any(response.count(tag) != 1 for tag in tags):
        return -1.0
    return -0.5 if len(response.rpartition("</answer>")[2].split()) > _MAX_TAIL_WORD_COUNT else 0.0


@dataclass(frozen=True)
class ZeroTirReward(AtMostOne):
    """Options, all off by default as published.

    format_penalties: penalize malformed responses; loose: do not check the thought
    failing_code_penalty: for a right answer after several executions of which more than 90 % failed (0.1 as published)
    longest, margin: tokens of DAPO's soft overlong punishment
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
        uses = trajectory.tool_uses
        if correct and len(uses) > 1 and sum(use.status in FAILED for use in uses) > 0.9 * len(uses):
            parts["failing_code"] = -self.failing_code_penalty
        if self.longest is not None:
            parts["overlong"] = Overlong(self.longest, self.margin).penalty(num_written(trajectory))
        return Score(sum(parts.values()), parts)

    def gold(self, task: Task, step: int) -> str:
        return f"I know this.</think> <answer>{boxed(task.answer)}</answer>"

    def mutations(self, task: Task, step: int) -> list[Mutation]:
        response = self.gold(task, step)
        boxes = corrupted_boxes(task.answer)
        del boxes["box unclosed"]
        corrupted = {name: f"I know this.</think> <answer>{text}</answer>" for name, text in boxes.items()}
        corrupted["answer unclosed"] = response.removesuffix("</answer>")
        corrupted["two answers"] = f"{response} <answer>{boxed(task.answer)}</answer>"
        corrupted["long tail"] = f"{response} and here follows a long tail of more text"
        if not self.loose:
            corrupted["thought unclosed"] = response.replace("</think>", "")
        return as_mutations(corrupted)
