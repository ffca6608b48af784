"""veRL's reward for GSM8K: 1 if the last `#### number` of the response is the gold number, else 0.

Only the last 300 characters are read, and numbers are compared as texts without commas, as in veRL. The gold is a
number, or a worked solution as in GSM8K, of which veRL keeps the number.
"""

import re

from verl.types import Score, Task, Trajectory
from verl.utils.reward_score.base import AtMostOne, Mutation, as_mutations, written

_NUMBER = re.compile(r"#### (-?[0-9.,]+)")
_TAIL = 300  # characters


class Gsm8kReward(AtMostOne):
    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        numbers = _NUMBER.findall(written(trajectory)[-_TAIL:])
        correct = float(bool(numbers) and numbers[-1].replace(",", "") == _gold(task))
        return Score(correct, {"correct": correct})

    def gold(self, task: Task, step: int) -> str:
        return f"#### {_gold(task)}"

    def mutations(self, task: Task, step: int) -> list[Mutation]:
        gold = self.gold(task, step)
        return as_mutations(
            {
                "empty text": "",
                "wrong number": "#### -987654321",
                "no mark": f"The answer is {_gold(task)}",
                "another number after it": f"{gold}\n#### -987654321",
                "an answer far from the end": gold + " " * _TAIL,
            }
        )


def _gold(task: Task) -> str:
    numbers = _NUMBER.findall(task.answer)
    return numbers[-1].replace(",", "") if numbers else task.answer
