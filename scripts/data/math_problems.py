r"""Problems of mathematics with short answers: {id, problem, answer}, or rows of ToRL's published parquet files.

    python scripts/data/math_problems.py --input math_train.jsonl.gz --output dataset/math/train.parquet
    python scripts/data/math_problems.py --input torl/train.parquet --output dataset/torl/train.parquet

ToRL's rows hold a system message and the gold answer under reward_model.ground_truth (beside `stype`, sic); its loader
reads the question alone. The system message here asks for a boxed answer, as ToRL's does; --instruction is another, and
"" leaves it out. A list of answers becomes one answer, separated by commas.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout that is not installed, too

from scripts.data.common import Row, parser, run, task, text
from verl.errors import DataError

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."


def convert(row: Any, arguments: argparse.Namespace) -> Iterator[Row]:
    """The one task of a row."""
    if "prompt" in row:  # ToRL's
        questions = [message["content"] for message in row["prompt"] if message["role"] == "user"]
        if len(questions) != 1:
            raise DataError(f"has {len(questions)} messages of role user", "one", field="prompt")
        question, answer = questions[0], text(row["reward_model"], "ground_truth")
        number = str((row.get("extra_info") or {}).get("id", ""))
    else:
        question, number = text(row, "problem", "question"), str(row.get("id", ""))
        answer = ", ".join(row["answer"]) if isinstance(row["answer"], list) else text(row, "answer")
    asked = [{"role": "user", "content": question}]
    if arguments.instruction:
        asked.insert(0, {"role": "system", "content": arguments.instruction})
    yield task(row.get("data_source") or arguments.data_source, "math", asked, answer, number)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the conversion; returns the exit code."""
    options = parser(__doc__)
    options.add_argument("--data-source", default="math", help="where rows do not say it themselves")
    options.add_argument("--instruction", default=INSTRUCTION)
    return run(options.parse_args(argv), convert)


if __name__ == "__main__":
    sys.exit(main())
