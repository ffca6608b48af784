r"""Math problems with short answers, as tasks with the plain question.

    python scripts/data/math_problems.py --input math_train.jsonl.gz --output dataset/math/train.parquet
    python scripts/data/math_problems.py --input torl/train.parquet --output dataset/torl/train.parquet

Forms:

    {problem or question, answer or final_answer}     DeepMath-103K uses final_answer
    [{from, value}, {from, ground_truth: {value}}]    Open-Reasoner-Zero's files, e.g. ORZ-57k
    {prompt, reward_model: {ground_truth}}            veRL's format, e.g. ToRL's published parquet files

In veRL's rows the user message is the question; other messages, such as ToRL's system message, are dropped, as in its
loader. Recipes with tools have their own prompts. For a run without tools (env.tool_call_format not set), --instruction
prepends a system message:

    --instruction 'Please reason step by step, and put your final answer within \boxed{}.'

A list of answers is joined with commas.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout that is not installed, too

from scripts.data.common import Row, parser, run, task, text
from verl.errors import DataError


def convert(row: Any, arguments: argparse.Namespace) -> Iterator[Row]:
    """The one task of a row."""
    about = row if isinstance(row, Mapping) else {}
    if isinstance(row, list):
        if len(row) != 2:
            raise DataError(f"is a list of {len(row)} messages", "a question and its answer")
        question, answer, number = text(row[0], "value"), text(row[1]["ground_truth"], "value"), ""
    elif "prompt" in row:
        questions = [text(message, "content") for message in row["prompt"] if message["role"] == "user"]
        if len(questions) != 1:
            raise DataError(f"has {len(questions)} messages of role user", "one", field="prompt")
        question, answer = questions[0], text(row["reward_model"], "ground_truth")
        number = str((row.get("extra_info") or {}).get("id", ""))
    else:
        question, number = text(row, "problem", "question"), str(row.get("id", ""))
        answers = row.get("answer")
        answer = ", ".join(answers) if isinstance(answers, list) else text(row, "answer", "final_answer")
    prompt = [{"role": "user", "content": question}]
    if arguments.instruction:
        prompt.insert(0, {"role": "system", "content": arguments.instruction})
    yield task(about.get("data_source") or arguments.data_source, "math", prompt, answer, number)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the conversion; returns the exit code."""
    options = parser(__doc__)
    options.add_argument("--data-source", default="math", help="for rows without data_source")
    options.add_argument("--instruction", default="", help="a system message; default: none")
    return run(options.parse_args(argv), convert)


if __name__ == "__main__":
    sys.exit(main())
