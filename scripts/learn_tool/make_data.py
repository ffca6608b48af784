"""Data for scripts/learn_tool.sh: sums and products beyond a small model, and poor demonstrations.

    python scripts/learn_tool/make_data.py --out FOLDER [--seed 0] [--plain 0]

Writes demonstrations.jsonl (for main_sft), train.jsonl and test.jsonl (for main_ppo). Operands have two digits in
demonstrations, three in training and four in the test, so that the files share none. Three demonstrations of arithmetic
in ten call the calculator; the others guess a wrong number.

--plain is the share of questions, in every file, whose answer stands in the question. All their demonstrations give it
without a call. Rows have the data source `arithmetic` or `plain`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout that is not installed, too

from toolrl.tools.calculator import calculator, value_of
from verl.formats.prompt import function_schema

ARITHMETIC = "arithmetic"
PLAIN = "plain"
PRODUCT_SHARE = 0.7
PRODUCTS = (
    "What is {a} times {b}?",
    "Compute {a} * {b}.",
    "A crate holds {a} bottles. How many bottles are in {b} crates?",
    "One ticket costs {a} dollars. What do {b} tickets cost?",
    "A runner does {a} meters a lap. How far are {b} laps?",
)
SUMS = {"What is {a} plus {b}?": "+", "Add {a} and {b}.": "+", "What is {a} minus {b}?": "-"}
COPIES = {  # form: which of the two numbers is the answer
    "Write down the number {a}.": "a",
    "A parcel weighs {a} grams and costs {b} dollars. How many dollars does it cost?": "b",
    "Ada has {a} stamps and Ben has {b} stamps. How many stamps does Ada have?": "a",
    "The train to Rome has the number {a}, the train to Oslo {b}. What is the number of the train to Oslo?": "b",
}
OPERANDS = {"demonstrations": range(11, 100), "train": range(101, 1000), "test": range(1001, 10000)}
COUNTS = {"demonstrations": 40, "train": 600, "test": 100}
CALLS_IN_TEN = 3  # demonstrations of arithmetic


@dataclass(frozen=True)
class Question:
    """A question, its answer, and the expression that gives it; plain ones have none."""

    text: str
    answer: str
    expression: str | None = None

    @property
    def kind(self) -> str:
        return PLAIN if self.expression is None else ARITHMETIC


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plain", type=float, default=0.0, help="share of questions that need no tool")
    arguments = parser.parse_args()
    if not 0 <= arguments.plain < 1:
        parser.error(f"--plain must be at least 0 and below 1, got {arguments.plain}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, rows in datasets(arguments.seed, arguments.plain).items():
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        (arguments.out / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def datasets(seed: int, plain: float = 0.0) -> dict[str, list[dict[str, Any]]]:
    """The rows of the three files by name; the same for the same arguments."""
    draw = random.Random(seed)
    found = {name: list(islice(questions(OPERANDS[name], plain, draw), count)) for name, count in COUNTS.items()}
    shown = list(demonstrations(found["demonstrations"], draw))
    return {"demonstrations": shown, **{name: list(map(task, found[name])) for name in ("train", "test")}}


def questions(operands: range, plain: float, draw: random.Random) -> Iterator[Question]:
    """Questions without end, each text once."""
    seen: set[str] = set()
    while True:
        a, b = draw.choice(operands), draw.choice(operands)
        found = copied(a, b, draw) if draw.random() < plain else computed(a, b, draw)
        if found.text not in seen:
            seen.add(found.text)
            yield found


def computed(a: int, b: int, draw: random.Random) -> Question:
    if draw.random() < PRODUCT_SHARE:
        form, operator = draw.choice(PRODUCTS), "*"
    else:
        form, operator = draw.choice(list(SUMS.items()))
    expression = f"{a} {operator} {b}"
    return Question(form.format(a=a, b=b), str(value_of(expression)), expression)


def copied(a: int, b: int, draw: random.Random) -> Question:
    form, answer = draw.choice(list(COPIES.items()))
    return Question(form.format(a=a, b=b), str(a if answer == "a" else b))


def task(question: Question) -> dict[str, Any]:
    """A row for RL: the question and the gold number."""
    return {
        "data_source": question.kind,
        "prompt": [{"role": "user", "content": question.text}],
        "reward_model": {"ground_truth": question.answer},
    }


def demonstrations(questions: list[Question], draw: random.Random) -> Iterator[dict[str, Any]]:
    """Conversations in OpenAI's form."""
    num_computed = 0
    for question in questions:
        calls = question.expression is not None and num_computed % 10 < CALLS_IN_TEN
        num_computed += question.expression is not None
        messages: list[Mapping[str, Any]] = [{"role": "user", "content": question.text}]
        if calls:
            arguments = json.dumps({"expression": question.expression})
            function = {"name": calculator.spec.name, "arguments": arguments}
            call = {"id": "call_1", "type": "function", "function": function}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": "call_1", "content": question.answer})
        right = calls or question.expression is None
        answer = question.answer if right else str(wrong(question.answer, draw))
        messages.append({"role": "assistant", "content": f"The answer is {answer}."})
        yield {"messages": messages, "tools": [function_schema(calculator.spec)]}


def wrong(answer: str, draw: random.Random) -> int:
    """A guess of about the size of products of two digits that is not the answer."""
    guess = draw.randrange(100, 9000)
    return guess + 1 if str(guess) == answer else guess


if __name__ == "__main__":
    main()
