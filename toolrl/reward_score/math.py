r"""Math reward: checks whether the answer in the last `\boxed{}` equals the gold answer (math_equality.py)."""

import re
from dataclasses import dataclass

from toolrl.reward_score.math_equality import same_answer
from verl.types import Score, Task, Trajectory
from verl.utils.reward_score.base import AtMostOne, Mutation, as_mutations, written

_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)


def last_box(response: str) -> str | None:
    r"""Content of the last closed `\boxed{}`, with balanced braces; None if there is none. One linear pass."""
    open_braces: list[int | None] = []  # start of a box's content; None for any other brace
    found = None
    for match in _BRACES.finditer(response):
        brace = match.group()
        if brace == "}":
            start = open_braces.pop() if open_braces else None
            if start is not None:
                found = response[start : match.start()]
        elif brace == "{":
            open_braces.append(None)
        elif brace.startswith("\\boxed"):
            open_braces.append(match.end())
    return found


def math_correct(response: str, gold: str) -> bool:
    r"""Whether the last box has the gold answer or, in any order, answers. Raises ConfigError without math-verify."""
    answer = last_box(response)
    return answer is not None and same_answer(answer, gold)


def boxed(answer: str) -> str:
    return f"So the answer is \\boxed{{{answer}}}."


def corrupted_boxes(answer: str) -> dict[str, str]:
    """All corruptions of `boxed(answer)` that must lose the reward, by name."""
    wrong = "-987654321"
    return {
        "empty text": "",
        "wrong answer": boxed(wrong),
        "no box": f"So the answer is {answer}.",
        "box unclosed": f"So the answer is \\boxed{{{answer}",
        "empty box": boxed(""),
        "another box after it": f"{boxed(answer)} No: {boxed(wrong)}",
        "a list of guesses": boxed(f"{answer}, {wrong}"),
    }


class BoxLab(AtMostOne):
    """Reward-lab methods of rewards that give 1 to a response with the right box, and less to any other."""

    def gold(self, task: Task, step: int) -> str:
        return boxed(task.answer)

    def mutations(self, task: Task, step: int) -> list[Mutation]:
        return as_mutations(corrupted_boxes(task.answer))


@dataclass(frozen=True)
class MathReward(BoxLab):
    """1 if the last box in the policy's text contains the right answer, else 0."""

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        correct = float(math_correct(written(trajectory), task.answer))
        return Score(correct, {"correct": correct})
