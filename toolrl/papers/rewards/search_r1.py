"""Search-R1's rewards: exact match of the answer block, and the version that also scores the episode's format.

An episode is  (<think> .. </think> <search> .. </search> observation)*  <think> .. </think> <answer> .. </answer>, with
only whitespace between the blocks. Only the policy's text is read, so a single answer block is enough; the published
code also reads the prompt and has to skip its example.

    exact match (the paper)   right 1, else 0
    with format (v0.3)        right 1, or 0.8 if malformed; wrong 0.2 if well-formed, 0.1 with an answer block, else 0
"""

from dataclasses import dataclass

from toolrl.reward_score.answers import (
    answer_response,
    corrupted_answers,
    episode_text,
    exact_match,
    follows_cycle,
    last_answer,
)
from verl.types import Score, Task, Trajectory
from verl.utils.reward_score.base import AtMostOne, Mutation, as_mutations


@dataclass(frozen=True)
class SearchR1Reward(AtMostOne):
    """Option `with_form`: score the format as in v0.3; the other two options are its constants."""

    with_form: bool = False
    good_form: float = 0.2
    any_answer: float = 0.1

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        response = episode_text(trajectory)
        right = exact_match(response, task.answer)
        if not self.with_form:
            return Score(float(right), {"correct": float(right)})
        form = follows_cycle(trajectory, "search", "information")
        if right:
            total = 1.0 if form else 1.0 - self.good_form
        elif form:
            total = self.good_form
        else:
            total = 0.0 if last_answer(response) is None else self.any_answer
        return Score(total, {"correct": float(right), "format": float(form)})

    def gold(self, task: Task, step: int) -> str:
        return answer_response(task.answer)

    def mutations(self, task: Task, step: int) -> list[Mutation]:
        return as_mutations(corrupted_answers(task.answer))
