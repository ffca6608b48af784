r"""veRL's reward for DAPO's and AIME's problems: 1 for the right answer, else -1.

The answer is the rest of the last line with `Answer:`, or without one the last `\boxed{}`. As in veRL, only the end is
read: 300 characters for the line, 100 for the box. Answers are compared by math-verify, in veRL as normalized texts.
"""

import re

from toolrl.reward_score.math import boxed, last_box
from toolrl.reward_score.math_equality import same_answer
from verl.types import Score, Task, Trajectory
from verl.utils.reward_score.base import AtMostOne, Mutation, as_mutations, written

_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_LINE_TAIL, _BOX_TAIL = 300, 100  # characters


class MathDapoReward(AtMostOne):
    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        answer = _stated(written(trajectory))
        correct = answer is not None and same_answer(answer, task.answer)
        return Score(1.0 if correct else -1.0, {"correct": float(correct)})

    def gold(self, task: Task, step: int) -> str:
        return f"Answer: {task.answer}"

    def mutations(self, task: Task, step: int) -> list[Mutation]:
        gold, wrong = self.gold(task, step), "Answer: -987654321"
        return as_mutations(
            {
                "empty text": "",
                "wrong answer": wrong,
                "no mark": f"It is {task.answer}",
                "another answer after it": f"{gold}\n{wrong}",
                "a box after a wrong answer": f"{wrong}\n{boxed(task.answer)}",
                "an answer far from the end": gold + "\n" + " " * _LINE_TAIL,
            }
        )


def _stated(response: str) -> str | None:
    """The answer that a response ends with; None if there is none, and for a line with a box and more."""
    lines = _LINE.findall(response[-_LINE_TAIL:])
    if not lines:
        return last_box(response[-_BOX_TAIL:])
    box = last_box(lines[-1])
    if box is None:
        return str(lines[-1])
    return box if lines[-1].strip(" $.") == f"\\boxed{{{box}}}" else None
