"""Data for scripts/learn_tool.sh: sums and products beyond a small model, and poor demonstrations.

    python scripts/learn_tool/make_data.py --out FOLDER [--seed 0] [--plain 0] [--steps 1]

Writes demonstrations.jsonl (for main_sft), train.jsonl and test.jsonl (for main_ppo). Operands have two digits in
demonstrations, three in training and four in the test, so that the files share none. Three demonstrations of arithmetic
in ten call the calculator; the others guess a wrong number.

--plain is the share of questions, in every file, whose answer stands in the question. All their demonstrations give it
without a call. --steps 2 or 3 asks for that many operations at most, but two at least, each with the result of the one
before; then the calculator works out one a call. Rows have the data source `arithmetic`, `two_steps`, `three_steps` or
`plain`.
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

from scripts.learn_tool.one_operation import one_operation
from toolrl.tools.calculator import calculator, value_of
from verl.formats.prompt import function_schema

ARITHMETIC = "arithmetic"
PLAIN = "plain"
KINDS = (PLAIN, ARITHMETIC, "two_steps", "three_steps")  # by the number of operations
PRODUCT_SHARE = 0.7
PRODUCTS = (
    "What is {a} times {b}?",
    "Compute {a} * {b}.",
    "A crate holds {a} bottles. How many bottles are in {b} crates?",
    "One ticket costs {a} dollars. What do {b} tickets cost?",
    "A runner does {a} meters a lap. How far are {b} laps?",
)
SUMS = {"What is {a} plus {b}?": "+", "Add {a} and {b}.": "+", "What is {a} minus {b}?": "-"}
CHAINS = {  # form: its operators, from left to right
    "What is {} times {}, plus {}?": "*+",
    "A shop has {} crates of {} bottles. {} bottles break. How many are left?": "*-",
    "Ada has {} stamps, buys {} and gives away {}. How many stamps has she now?": "+-",
    "What is {} times {}, plus {}, minus {}?": "*+-",
    "A shop has {} crates of {} bottles. {} bottles break and {} arrive. How many has it now?": "*-+",
    "Ada has {} stamps, buys {}, gives away {} and finds {}. How many stamps has she now?": "+-+",
}
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
    """A question, its answer, and the operations that give it, each as (expression, result); plain ones have none."""

    text: str
    answer: str
    operations: tuple[tuple[str, str], ...] = ()

    @property
    def kind(self) -> str:
        return KINDS[len(self.operations)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plain", type=float, default=0.0, help="share of questions that need no tool")
    parser.add_argument("--steps", type=int, default=1, choices=(1, 2, 3), help="operations of a question, at most")
    arguments = parser.parse_args()
    if not 0 <= arguments.plain < 1:
        parser.error(f"--plain must be at least 0 and below 1, got {arguments.plain}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, rows in datasets(arguments.seed, arguments.plain, arguments.steps).items():
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        (arguments.out / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def datasets(seed: int, plain: float = 0.0, steps: int = 1) -> dict[str, list[dict[str, Any]]]:
    """The rows of the three files by name; the same for the same arguments."""
    draw = random.Random(seed)
    drawn = {name: questions(OPERANDS[name], plain, steps, draw) for name in COUNTS}
    found = {name: list(islice(drawn[name], count)) for name, count in COUNTS.items()}
    shown = list(demonstrations(found["demonstrations"], draw))
    return {"demonstrations": shown, **{name: list(map(task, found[name])) for name in ("train", "test")}}


def questions(operands: range, plain: float, steps: int, draw: random.Random) -> Iterator[Question]:
    """Questions without end, each text once."""
    seen: set[str] = set()
    while True:
        a, b = draw.choice(operands), draw.choice(operands)
        if draw.random() < plain:
            found = copied(a, b, draw)
        elif steps > 1:
            found = chained(operands, steps, draw)
        else:
            found = computed(a, b, draw)
        if found.text not in seen:
            seen.add(found.text)
            yield found


def computed(a: int, b: int, draw: random.Random) -> Question:
    if draw.random() < PRODUCT_SHARE:
        form, operator = draw.choice(PRODUCTS), "*"
    else:
        form, operator = draw.choice(list(SUMS.items()))
    expression = f"{a} {operator} {b}"
    answer = str(value_of(expression))
    return Question(form.format(a=a, b=b), answer, ((expression, answer),))


def chained(operands: range, steps: int, draw: random.Random) -> Question:
    """A question of several operations, each with the result of the one before."""
    form, operators = draw.choice([each for each in CHAINS.items() if len(each[1]) <= steps])
    numbers = sorted((draw.choice(operands) for _ in range(len(operators) + 1)), reverse=True)  # no result below 0
    result, operations = str(numbers[0]), []
    for operator, number in zip(operators, numbers[1:], strict=True):
        expression = f"{result} {operator} {number}"
        result = str(value_of(expression))
        operations.append((expression, result))
    return Question(form.format(*numbers), result, tuple(operations))


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
    tool = one_operation if any(len(question.operations) > 1 for question in questions) else calculator
    num_computed = 0
    for question in questions:
        calls = bool(question.operations) and num_computed % 10 < CALLS_IN_TEN
        num_computed += bool(question.operations)
        messages: list[Mapping[str, Any]] = [{"role": "user", "content": question.text}]
        for number, (expression, result) in enumerate(question.operations if calls else (), 1):
            function = {"name": tool.spec.name, "arguments": json.dumps({"expression": expression})}
            call = {"id": f"call_{number}", "type": "function", "function": function}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": result})
        right = calls or not question.operations
        answer = question.answer if right else str(wrong(question.answer, draw))
        messages.append({"role": "assistant", "content": f"The answer is {answer}."})
        yield {"messages": messages, "tools": [function_schema(tool.spec)]}


def wrong(answer: str, draw: random.Random) -> int:
    """A guess of about the size of products of two digits that is not the answer."""
    guess = draw.randrange(100, 9000)
    return guess + 1 if str(guess) == answer else guess


if __name__ == "__main__":
    main()
