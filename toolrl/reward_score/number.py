"""Outcome reward for questions with a number: 1 if the last number of the last turn is the gold number, else 0.

An episode that a limit ended has no answer: its last turn may be a call that was not run, and a policy that is paid for
it learns to write the number there. Tool results and earlier turns are not read. Numbers are compared by value: 1,234
is 1234.0.
"""

import re
from decimal import Decimal

from verl.errors import DataError
from verl.types import GROUND_TRUTH, Score, StopReason, Task, Trajectory
from verl.utils.reward_score.base import AtMostOne, Mutation, as_mutations

_NUMBER = re.compile(r"(?<![\d.])-?\d[\d,]*(?:\.\d+)?")


def last_number(text: str) -> Decimal | None:
    """The last number of a text, without its commas; None if there is none."""
    found = _NUMBER.findall(text)
    return _value(found[-1]) if found else None


class NumberReward(AtMostOne):
    """Options: none. The part `correct` is the total."""

    def check_task(self, task: Task) -> None:
        """Raises DataError if the gold answer is no number."""
        _gold(task)

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        answers = trajectory.stop_reason is StopReason.STOP and bool(trajectory.turns)
        correct = float(answers and last_number(trajectory.turns[-1].message.content) == _gold(task))
        return Score(correct, {"correct": correct})

    def gold(self, task: Task, step: int) -> str:
        return f"The answer is {task.answer}."

    def mutations(self, task: Task, step: int) -> list[Mutation]:
        gold = self.gold(task, step)
        return as_mutations(
            {
                "empty text": "",
                "no number": "I do not know.",
                "another number": f"The answer is {_gold(task) + 1}.",
                "opposite sign": f"The answer is {-_gold(task) or 1}.",
                "another number after it": f"{gold} Or {_gold(task) + 1}.",
            }
        )


def _gold(task: Task) -> Decimal:
    found = _NUMBER.fullmatch(task.answer.strip())
    if found is None:
        raise DataError(f"is {task.answer[:80]!r}", "a number, such as 1234", field=GROUND_TRUTH)
    return _value(found[0])


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", ""))
