r"""What a policy may write at its worst, and how long a reward looks at it: repetition, nesting, huge numbers."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolrl.reward_score.math import math_correct
from toolrl.reward_score.math_equality import same_answer
from verl.formats.base import TOOL_CALL_FORMATS, build_tool_call_format
from verl.formats.response import parsed_response
from verl.types import Completion, FinishReason, Message, Outcome, Score, StopReason, Task, ToolCall, Trajectory, Turn
from verl.utils.reward_score.base import REWARDS, build_reward

pytestmark = pytest.mark.usefixtures("small_heap")
SIZE = 100_000
CALL = '{"name": "a", "parameters": {"x": 1}}'


def tower(height: int) -> str:
    return "x^{" * height + "x" + "}" * height


ANSWERS = {
    "a binomial of millions": r"\binom{10000000}{5000000}",
    "powers 60 deep": tower(60),
    "set braces 60 deep": r"\{" * 60 + "1" + r"\}" * 60,
    "braces 140 deep": "{" * 140 + "1" + "}" * 140,
    "parentheses 140 deep": "(" * 140 + "1" + ")" * 140,
    "brackets 140 deep": "[" * 140 + "1" + "]" * 140,
    "parentheses never closed": "(" * 290,
    "braces never closed": "{" * 290,
    "9**9**9": "9**9**9",
    "a tower of nines": "9^{9^{9}}",
    "a tower of tens": "10^{10^{10}}",
    "a factorial": "100000000!",
    "factorials of factorials": "((10!)!)!",
    "a sum of millions": r"\sum_{n=1}^{100000000} n",
    "a product of millions": r"\prod_{n=1}^{1000000} n",
    "an integral": r"\int_0^1 x^x dx",
    "a polynomial": "(x+y+z)^{1000}",
    "a power of billions": "2^{1000000000}",
    "sines 40 deep": r"\sin(" * 40 + "1" + ")" * 40,
    "signs": "-" * 290 + "1",
    "equations": "x=" * 140 + "1",
    "subscripts": "x_" * 140 + "1",
    "powers without braces": "x^" * 140 + "1",
    "unions": r"(1,2)\cup" * 28 + "(1,2)",
    "derivatives": r"\frac{d}{dx}" * 20 + "x^{x}",
    "fractions": r"\frac{1}{" * 19 + "2" + "}" * 19,
    "logarithms": r"\frac{\log 2}{\log 2-\log 3}",
    "commas": ",".join("1" * 140),
}


def seconds_of(answer: str, gold: str = "5") -> float:
    """Processor time: others use the machine, too."""
    same_answer("1", "2")  # imports
    began = time.process_time()
    assert same_answer(answer, gold) is False
    return time.process_time() - began


@pytest.mark.long
@pytest.mark.parametrize("answer", list(ANSWERS.values()), ids=list(ANSWERS))
def test_a_degenerate_answer_is_wrong_within_a_second(answer: str) -> None:
    assert seconds_of(answer) < 1.0 + 1.0  # the timer interrupts between two operations


_PIECES = st.sampled_from(
    ["(", ")", "{", "}", r"\{", r"\}", "[", "]", "^{", "_", "1", "x", "+", "-", r"\frac", ",", "!", "|"]
)


@given(st.lists(_PIECES, min_size=1, max_size=12), st.integers(1, 20))
@settings(max_examples=25, deadline=None)
def test_nestings_and_repetitions_end(pieces: list[str], times: int) -> None:
    same_answer("1", "2")
    began = time.process_time()
    same_answer("".join(pieces) * times, "-987654321")
    assert time.process_time() - began < 1.5


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        (r"\dfrac{\sqrt{2+\sqrt{3}}}{2}", r"\frac{\sqrt{\sqrt{3}+2}}{2}"),
        ("((((1))))", "1"),
        (r"\left\{-1,\frac12\right\}", r"\{\frac{1}{2}, -1\}"),
        (r"2^{2^{3}}", "256"),
        (r"\binom{10}{5}", "252"),
        ("20!", "2432902008176640000"),
        ("[1, 2) \\cup (3, 4]", "(3,4] \\cup [1,2)"),
        ("1,2,3", "3, 2, 1"),
    ],
)
def test_a_right_answer_is_right(answer: str, gold: str) -> None:
    assert same_answer(answer, gold)


HOSTILE = (
    "__import__('os').mkdir('m')",
    "eval(\"__import__('os').mkdir('m')\")",
    "exec('import os; os.mkdir(\"m\")')",
    "(lambda: __import__('os').mkdir('m'))()",
    "lambda x: __import__('os').mkdir('m')",
    "[__import__('os').mkdir('m') for x in (1,)]",
    "f\"{__import__('os').mkdir('m')}\"",
    "5 if __import__('os').mkdir('m') else 5",
    "5; __import__('os').mkdir('m')",
    "os.mkdir('m')",
    "open('m', 'w')",
    "sympify(\"__import__('os').mkdir('m')\")",
    "Integer.__class__.__base__.__subclasses__()",
    "x.__class__.__mro__",
    r"\text{__import__('os').mkdir('m')}",
    r"\operatorname{eval}(__import__('os').mkdir('m'))",
    "$__import__('os').mkdir('m')$",
    "{{ cycler.__init__.__globals__.os.mkdir('m') }}",
    "$(mkdir m)",
    "`mkdir m`",
    r"\write18{mkdir m}",
    r"\input{/etc/passwd}",
)


@pytest.mark.parametrize("answer", HOSTILE)
def test_an_answer_runs_no_code(answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for gold in ("x+1", "6", "[1, 2)", "1,2"):
        assert not same_answer(answer, gold) and not same_answer(gold, answer)
        assert not math_correct(rf"So \boxed{{{answer}}}.", gold)
    assert not list(tmp_path.iterdir())


LONG: Mapping[str, str] = {
    "letters": "a" * SIZE,
    "blanks": " " * SIZE,
    "lines": "\n" * SIZE,
    "terms": "the a an " * (SIZE // 9),
    "braces": "{" * SIZE,
    "brackets": "[" * SIZE,
    "closed brackets": "[" * (SIZE // 2) + "]" * (SIZE // 2),
    "boxes": r"\boxed{" * (SIZE // 7) + "1" + "}" * (SIZE // 7),
    "backslashes": "\\" * SIZE,
    "quotes": '"' * SIZE,
    "digits": "9" * SIZE,
    "thoughts": "<think>" * (SIZE // 7),
    "answers": "<answer>a</answer>" * (SIZE // 18),
    "open answers": "<answer>" * (SIZE // 8) + "</answer>",
    "calls": "<tool_call>" * (SIZE // 11) + "</tool_call>",
    "gold calls": "<think>a</think>\n<tool_call>\n" + f"{CALL}\n" * (SIZE // len(CALL)) + "</tool_call>",
    "lists of calls": "<think>a</think><tool_call>[" + f"{CALL}, " * (SIZE // len(CALL)) + "1]</tool_call>",
    "searches": "<think>a</think><search>b</search>" * (SIZE // 34),
    "code": "```python\n" * (SIZE // 10),
    "half tags": "<" * SIZE,
    "punctuation": ".,;:!?" * (SIZE // 6),
    "json text": json.dumps(json.dumps("\\" * (SIZE // 8))),
}

ANSWER_OF = {
    "rlla": f"<think>a</think>\n<tool_call>\n{CALL}\n</tool_call>",
    "tool_n1": '[{"name": "a", "arguments": {"x": 1}}]',
    "api_bank": CALL,
    "bfcl": '[{"a": {"x": [1]}}]',
}
TOOL = {"name": "a", "parameters": {"properties": {"x": {"type": "integer"}}, "required": ["x"]}}


@pytest.mark.parametrize("name", [each for each in REWARDS if each != "judge"])  # which asks a server
def test_a_long_response_is_scored_in_less_than_a_second(name: str) -> None:
    reward, lines = build_reward(name, {"terms": ["rlla"]} if name == "sum" else {}), build_tool_call_format("toolrl")
    gold = Message("assistant", "", (ToolCall("a", {"x": 1}),), calls_in_content=False)
    task = Task("t", (Message("user", "?"),), ANSWER_OF.get(name, "5"), "d", extra={"tools": [TOOL]}, gold=gold)
    judged = Score(0.0, {"state": 0.0, "functions": 0.0})

    def seconds(text: str) -> float:
        message, parsed = Message("assistant", text), parsed_response(lines, text, lines.parse(text))
        turn = Turn((), Completion((), (), FinishReason.STOP, 0), message, parsed=parsed)
        trajectory = Trajectory(task, 0, (turn,), StopReason.STOP, Outcome.SCORED, score=judged)
        began = time.process_time()
        reward.score(trajectory, task, 0)
        return time.process_time() - began

    seconds(r"<think>a</think><answer>\boxed{4}</answer>")  # imports
    slow = {kind: took for kind, text in LONG.items() if (took := seconds(text)) > 1.0}
    assert not slow


@pytest.mark.parametrize("name", sorted(TOOL_CALL_FORMATS.keys() - {"native"}))  # which needs a model's tokenizer
def test_a_long_response_is_read_in_less_than_a_second(name: str) -> None:
    tool_call_format = build_tool_call_format(name)
    slow = {}
    for kind, text in LONG.items():
        began = time.process_time()
        tool_call_format.parse(text)
        if (took := time.process_time() - began) > 1.0:
            slow[kind] = took
    assert not slow
