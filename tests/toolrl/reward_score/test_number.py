"""The reward of the last number: what is read, and what is not."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.toolrl.check.lab.lab import try_reward
from toolrl.reward_score.number import NumberReward, last_number
from verl.errors import DataError
from verl.types import Completion, FinishReason, Message, Outcome, Score, StopReason, Task, Trajectory, Turn


def task(answer: str) -> Task:
    return Task("t#0", (Message("user", "How many?"),), answer, "arithmetic")


def score(answer: str, *texts: str, seen: str = "0", stop: StopReason = StopReason.STOP) -> Score:
    """Of an episode in which the policy wrote these texts, with a tool's result between them."""
    done = Completion((), (), FinishReason.STOP, 0)
    turns = [Turn((), done, Message("assistant", text), (Message("tool", seen),)) for text in texts[:-1]]
    turns += [Turn((), done, Message("assistant", text)) for text in texts[-1:]]
    of = task(answer)
    return NumberReward().score(Trajectory(of, 0, tuple(turns), stop, Outcome.SCORED), of, 0)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 1,234.", "1234"),
        ("12 or 13", "13"),
        ("It is -7.", "-7"),
        ("10-3", "3"),  # a sign follows no digit
        ("10 - 3 = 7.50 dollars", "7.50"),
        ("12, 15,", "15"),
        ("Room 4b", "4"),
        ("none", None),
        ("", None),
    ],
)
def test_the_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == (None if number is None else Decimal(number))


@given(st.integers(-(10**12), 10**12))
def test_a_number_is_read_as_it_is_written(number: int) -> None:
    assert last_number(f"Not 3 but {number}.") == last_number(f"Not 3 but {number:,}.") == number


def test_the_reward_is_one_for_the_right_number_at_the_end_of_the_last_turn() -> None:
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6 * 7"}}\n</tool_call>'
    assert score("42", "The answer is 42.") == Score(1.0, {"correct": 1.0})
    assert score("42", call, "The answer is 42.0", seen="42").total == 1.0
    assert score("42", "The answer is 42, or 43.").total == 0.0
    assert score("42", call, "It is done.", seen="42").total == 0.0  # the tool's number is not an answer
    assert score("42", "42", "I am not certain.").total == 0.0  # nor is that of an earlier turn
    assert score("42").total == score("42", "").total == 0.0


@pytest.mark.parametrize("stop", [stop for stop in StopReason if stop is not StopReason.STOP])
def test_what_a_limit_ended_is_no_answer(stop: StopReason) -> None:
    again = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "42"}}\n</tool_call>'
    assert score("42", again, again, seen="42", stop=stop).total == 0.0
    assert score("42", "The answer is 42.", stop=stop).total == 0.0


def test_the_lab_reports_no_violation() -> None:
    report = try_reward(NumberReward(), [task(gold) for gold in ("0", "5", "-597", "1,234.5")])
    assert report.violations == [] and len(report.stats) > 4


@pytest.mark.parametrize("answer", ["", "five", "NaN", "1 and 2"])
def test_a_gold_answer_that_is_no_number_is_refused(answer: str) -> None:
    with pytest.raises(DataError, match="expected a number, such as 1234"):
        NumberReward().check_task(task(answer))
