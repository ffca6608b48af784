r"""Math reward: checks with math-verify whether the answer in the last `\boxed{}` equals the gold answer.

A few harmless-looking pairs make sympy run forever (e.g. log 2 / (log 2 - log 3) and a wrong integer), and so do deep
nesting and large numbers. An answer not proven equal within a fixed time counts as wrong. The limit is CPU time, so
that results do not depend on the machine's load. The timer works only in the main thread, where scoring runs
(verl/scoring/pool.py); the few computations it cannot interrupt, such as a power tower of decimals, end at the
scoring process's own deadline.
"""

import logging
import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any, ClassVar

from verl.errors import ConfigError
from verl.system.timer import PROCESSOR, raising_after
from verl.types import Score, Task, Trajectory
from verl.utils.reward_score.base import Mutation, as_mutations, written

_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_LONGEST_ANSWER = 300  # characters
_DEEPEST_ANSWER = 20  # brackets in brackets
_ANSWER_S = 0.8  # CPU time per answer
_GOLD_S = 10.0  # CPU time to parse a gold answer, once
_AGAIN_S = 0.1  # timer interval after the first signal, for code that swallows the exception
_WARM_UP = (r"\frac{\sqrt{2}}{3}", "(-1, 2]", r"x^2 + \pi", r"\{1, 2\}")


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


def same_answer(answer: str, gold: str) -> bool:
    """Whether two texts, LaTeX or plain, denote the same number, expression, set, or list of these."""
    answer, gold = _bare(answer), _bare(gold)
    if answer == gold:
        return bool(gold)
    depths = accumulate((letter in "([{") - (letter in ")]}") for letter in answer)  # of brackets, closed or not
    if len(answer) > _LONGEST_ANSWER or max(depths, default=0) > _DEEPEST_ANSWER:
        return False
    golds = _parts(gold)
    with _time_limit(_GOLD_S):
        for each in (gold, *golds):
            _parsed(each)
    try:
        with _time_limit(_ANSWER_S):
            return _equal(answer, gold) or _same_lists(_parts(answer), golds)
    except _OutOfTimeError:
        return False


class _OutOfTimeError(BaseException):
    """A BaseException, because the answer parser catches every Exception."""


def _time_limit(seconds: float) -> AbstractContextManager[None]:
    """Raises _OutOfTimeError in the block after this CPU time of the process; only in the main thread."""
    return raising_after(seconds, _OutOfTimeError, PROCESSOR, _AGAIN_S)


def _bare(text: str) -> str:
    """Strips a full stop, enclosing dollar signs and a percent sign, which math-verify does not parse in a box."""
    text = text.strip().removesuffix(".")
    if text.count("$") == 2 and text[0] == text[-1] == "$":
        text = text[1:-1].rstrip()
    return text.removesuffix("%").removesuffix("\\").rstrip() if text.endswith("%") else text


def _same_lists(answers: list[str], golds: list[str]) -> bool:
    if len(answers) != len(golds) or len(golds) < 2:
        return False
    for gold in golds:
        match = next((each for each in answers if each == gold or _equal(each, gold)), None)
        if match is None:
            return False
        answers.remove(match)
    return True


def _parts(text: str) -> list[str]:
    """The text split at commas outside all brackets: "221,$8$" gives "221" and "8"."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    return [part.replace("$", "").strip() for part in (*parts, text[start:])]


def _equal(answer: str, gold: str) -> bool:
    _, verify = _math_verify()
    return bool(verify(_parsed(gold), _parsed(answer), timeout_seconds=None))


@lru_cache(maxsize=4096)  # a gold answer is compared with all responses of its group
def _parsed(text: str) -> Any:
    parse, _ = _math_verify()
    return parse(f"\\boxed{{{text}}}", parsing_timeout=None)


@cache
def _math_verify() -> tuple[Any, Any]:
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ConfigError(f"math rewards need math-verify ({error}): pip install math-verify") from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at every call without its own timeout
    one = parse("$1$", parsing_timeout=None)
    for text in _WARM_UP:  # the first calls in a process take seconds, which must not count against an answer
        verify(parse(f"\\boxed{{{text}}}", parsing_timeout=None), one, timeout_seconds=None)
    return parse, verify


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


class BoxLab:
    """Reward-lab methods of rewards that give 1 to a response with the right box, and less to any other."""

    reads_step: ClassVar[bool] = False

    def maximum(self, task: Task, step: int) -> float:
        return 1.0

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
