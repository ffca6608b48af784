r"""Problems of mathematics with short answers, as tasks that hold the bare question.

    python scripts/data/math_problems.py --input math_train.jsonl.gz --output dataset/math/train.parquet
    python scripts/data/math_problems.py --input torl/train.parquet --output dataset/torl/train.parquet

Forms:

    {problem or question, answer or final_answer}     final_answer is DeepMath-103K's
    [{from, value}, {from, ground_truth: {value}}]    Open-Reasoner-Zero's files, ORZ-57k among them
    {prompt, reward_model: {ground_truth}}            veRL's, ToRL's published parquet files among them

Of veRL's rows the user's message is the question; other messages, such as ToRL's system message, are left out, as its
loader does. The recipes with tools bring prompts of their own. For a run without (env.tool_call_format not set),
--instruction puts a system message in front:

    --instruction 'Please reason step by step, and put your final answer within \boxed{}.'

A list of answers becomes one answer, separated by commas.
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
    asked = [{"role": "user", "content": question}]
    if arguments.instruction:
        asked.insert(0, {"role": "system", "content": arguments.instruction})
    yield task(about.get("data_source") or arguments.data_source, "math", asked, answer, number)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the conversion; returns the exit code."""
    options = parser(__doc__)
    options.add_argument("--data-source", default="math", help="where rows do not say it themselves")
    options.add_argument("--instruction", default="", help="a system message; none if left out")
    return run(options.parse_args(argv), convert)


if __name__ == "__main__":
    sys.exit(main())
