"""What is wrong with the answers to the held-out rows, for evaluations of scripts/learn_calls.sh.

    python scripts/learn_calls/report.py outputs/learn_calls_0/eval/FOLDER .. [--out FILE.jsonl]

Prints a table: kinds of answers, a column for each evaluation. --out gets the responses and rewards by row, without the
rows themselves.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout that is not installed, too

from toolrl.formats.hermes import HermesFormat
from verl.errors import DataError, VerlError
from verl.formats.base import Calls
from verl.host.exits import write_error
from verl.tracking.jsonl import read_jsonl, write_jsonl

ANSWERS = "answers/held_out.jsonl.jsonl"
KINDS = ("exact", "no readable call", "other tools", "arguments missing", "arguments too many", "other values", "other")
Answer = Mapping[str, Any]


def kind(answer: Answer) -> str:
    """One of KINDS; the first that fits."""
    if answer["metric_value"] == 1.0:
        return "exact"
    found = HermesFormat().parse(answer["responses"][0]["content"])
    golds = json.loads(answer["answer"])
    if not isinstance(found, Calls):
        return "no readable call"
    if sorted(call.name for call in found.calls) != sorted(call["name"] for call in golds):
        return "other tools"
    if len(golds) > 1:
        return "other"
    written, gold = found.calls[0].arguments.keys(), golds[0]["arguments"].keys()
    if written == gold:
        return "other values"
    return "arguments missing" if written < gold else "arguments too many" if written > gold else "other"


def table(evaluations: Mapping[str, Sequence[Answer]]) -> Iterator[str]:
    counts = {name: Counter(map(kind, answers)) for name, answers in evaluations.items()}
    yield f"| answers | {' | '.join(counts)} |"
    yield f"| --- |{' ---: |' * len(counts)}"
    for each in KINDS:
        yield f"| {each} | {' | '.join(str(count[each]) for count in counts.values())} |"


def responses(evaluations: Mapping[str, Sequence[Answer]]) -> Iterator[dict[str, Any]]:
    for name, answers in evaluations.items():
        for each in answers:
            written = [message["content"] for message in each["responses"]]
            row = {"evaluation": name, "id": each["task_id"], "source": each["data_source"], "index": each["index"]}
            yield {**row, "reward": each["reward"], "kind": kind(each), "response": written[0]}


def _named(folders: Sequence[Path]) -> dict[str, Path]:
    """By the arm, or by the whole name of the folder where arms have several."""
    arms = {each.name.partition("-")[0]: each for each in folders}
    return arms if len(arms) == len(folders) else {each.name: each for each in folders}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("evaluations", nargs="+", type=Path, metavar="FOLDER", help="of toolrl eval")
    parser.add_argument("--out", type=Path, metavar="FILE.jsonl")
    arguments = parser.parse_args(argv)
    try:
        if missing := [each for each in arguments.evaluations if not (each / ANSWERS).is_file()]:
            raise DataError(f"has no {ANSWERS}", "the folder of an evaluation", file=str(missing[0]))
        found = {name: list(read_jsonl(each / ANSWERS)) for name, each in _named(arguments.evaluations).items()}
    except VerlError as error:
        return write_error(error)
    sys.stdout.write("\n".join(table(found)) + "\n")
    if arguments.out:
        write_jsonl(arguments.out, list(responses(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
