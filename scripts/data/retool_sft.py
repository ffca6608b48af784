r"""Code-integrated demonstrations in ReTool's form, from GSM8K's worked solutions.

    python scripts/data/retool_sft.py --input gsm8k_train.jsonl.gz --output dataset/retool/sft.parquet --skip-bad-rows

A calculation annotated as <<48/2=24>> is replaced by code and its Python output:

    Natalia sold 48/2 = <code>print(48/2)</code> <interpreter>24.0</interpreter> 24 clips in May.

(with the fence and the line breaks of ReTool's rollouts). Interpreter output is masked in training
(verl/sft/demonstrations.py).
Dropped are solutions without annotations, with annotations that differ from Python's result, or without a result equal
to the answer. ReTool's own data was rewritten by a language model; this conversion is rule-based.

The prompt is that of recipe=retool in RL. For another data.prompt_template there, pass the same as --template.
"""

from __future__ import annotations

import argparse
import ast
import operator
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout that is not installed, too

from scripts.data.common import DEMONSTRATIONS, Row, parser, run, text
from toolrl.reward_score.math import math_correct
from verl.errors import ConfigError, DataError
from verl.formats.prompt import PromptTemplate, load_template

_NOTE = re.compile(r"<<([^<>=]+)=([^<>=]+)>>")
_STEP = "\n<code>\n```python\nprint({code})\n```\n</code>\n<interpreter>\n{output}</interpreter>\n\n"
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def calculated(code: str) -> int | float:
    """Evaluates plain arithmetic. Raises DataError for anything else."""
    try:
        return _value(ast.parse(code, mode="eval").body)
    except (SyntaxError, ZeroDivisionError, OverflowError, RecursionError) as error:
        raise DataError(
            "has an annotation that is not a calculation", "numbers and + - * / ( )", field="solution"
        ) from error


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        number: int | float = node.value
        return number
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        result: int | float = _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
        return result
    raise DataError("has an annotation that is not a calculation", "numbers and + - * / ( )", field="solution")


def demonstration(solution: str, answer: str) -> str:
    """The response with code. Raises DataError for an unsuitable solution."""
    worked = solution.partition("####")[0].strip()
    pieces = _NOTE.split(worked)  # text, code, result, text, ..
    if len(pieces) == 1:
        raise DataError("notes no calculation", field="solution")
    written, outputs = pieces[0].rstrip(), []
    for code, noted, following in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
        output = calculated(code.strip())
        decimals = len(noted.partition(".")[2])
        if abs(output - float(noted)) > 0.5 * 10**-decimals + 1e-9:
            raise DataError("notes a result that is not Python's", field="solution")
        outputs.append(output)
        written += _STEP.format(code=code.strip(), output=output) + following.strip(" ")
    response = f"{written.rstrip()}\n<answer>\n\\boxed{{{answer}}}\n</answer>"
    if "<<" in response or ">>" in response:
        raise DataError("has a note that cannot be read", field="solution")
    if not math_correct(response, answer) or not any(abs(output - _number(answer)) < 1e-6 for output in outputs):
        raise DataError("does not calculate its answer", field="solution")
    return response


def _number(answer: str) -> float:
    return float(answer.replace(",", ""))


def convert(row: Any, arguments: argparse.Namespace) -> Iterator[Row]:
    """The one conversation of a row."""
    response = demonstration(text(row, "solution"), text(row, "answer"))
    prompt = arguments.template.fill(text(row, "problem"), "")
    yield {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the conversion; returns the exit code."""
    options = parser(__doc__)
    options.add_argument("--template", type=_template, default="retool", help="as data.prompt_template")
    return run(options.parse_args(argv), convert, DEMONSTRATIONS)


def _template(path_or_name: str) -> PromptTemplate:
    try:
        return load_template(path_or_name)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
