"""What a run of scripts/learn_tool.sh has learned: greedy answers to the test questions before and after it.

    python scripts/learn_tool/report.py OUT

Prints a table and two questions with their answers, and writes them to OUT/result.md. OUT/result.json has the same
figures and those of every step, OUT/answers.jsonl every answer. Intervals are 95 %: Wilson's for shares, a paired
bootstrap over questions for the difference.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout that is not installed, too

from toolrl.benchmarks.runner.stats import RESAMPLES, estimate, wilson
from verl.host.files import replacing, step_files
from verl.tracking.jsonl import read_jsonl, write_jsonl

WHEN = ("before", "after")
STEP_METRICS = {
    "reward": "reward/total",
    "calls": "tools/usage_rate",
    "calls_if_right": "tools/usage_rate_correct",
    "entropy": "actor/entropy",
    "seconds": "time/step_s",
}
NUM_SHOWN = 2  # questions
Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder of the run")
    out: Path = parser.parse_args(argv).out
    run = out / "learn_tool"
    files = step_files(run / "validation", ".jsonl")
    if len(files) < 2:
        expected = "expected one before the training and one after it; has the run ended?"
        print(f"{run / 'validation'} has {len(files)} validations, {expected}", file=sys.stderr)
        return 2
    steps = min(files), max(files)
    rows = paired(*(read_jsonl(files[step]) for step in steps))
    kinds = {kind: [row for row in rows if row["kind"] == kind] for kind in sorted({row["kind"] for row in rows})}
    found = {kind: {when: figures(of_kind, when) for when in WHEN} for kind, of_kind in kinds.items()}
    gains = {kind: gain(kind, of_kind) for kind, of_kind in kinds.items()}
    text = "\n".join([*table(found, gains, steps), *shown(rows[:NUM_SHOWN])]) + "\n"
    curve = [step_figures(row) for row in read_jsonl(run / "metrics.jsonl") if STEP_METRICS["reward"] in row]
    write_jsonl(out / "answers.jsonl", rows)
    write(out / "result.md", text)
    write(out / "result.json", json.dumps({"steps": steps, "questions": found, "gain": gains, "curve": curve}))
    print(text, end="")
    return 0


def paired(before: Sequence[Row], after: Sequence[Row]) -> list[Row]:
    """A row for each question, with what became of it before and after."""
    earlier = {row["task_id"]: row for row in before}
    return [
        {
            "id": row["task_id"],
            "kind": row["data_source"],
            "question": row["prompt"][-1]["content"],
            "answer": row["answer"],
            "before": outcome(earlier[row["task_id"]]),
            "after": outcome(row),
        }
        for row in after
    ]


def outcome(row: Row) -> Row:
    """Whether a rollout was right, whether it ran a tool, and all its turns, a tool's included."""
    turns = [f"{message['role']}: {message['content']}" for message in row["responses"]]
    return {"right": row["score"]["total"] == 1, "called": bool(row["tool_uses"]), "turns": turns}


def figures(rows: Sequence[Row], when: str) -> Row:
    """Counts of the questions: all, right, with a call, right with a call."""
    outcomes = [row[when] for row in rows]
    called = [each for each in outcomes if each["called"]]
    return {
        "questions": len(outcomes),
        "right": sum(each["right"] for each in outcomes),
        "called": len(called),
        "right_with_call": sum(each["right"] for each in called),
    }


def gain(name: str, rows: Sequence[Row]) -> Row:
    """The difference of the shares that are right, after minus before, with its interval."""
    return estimate(name, [row["after"]["right"] - row["before"]["right"] for row in rows], RESAMPLES).as_dict()


def step_figures(metrics: Mapping[str, Any]) -> Row:
    return {"step": metrics["step"], **{name: metrics.get(metric) for name, metric in STEP_METRICS.items()}}


def table(found: Mapping[str, Row], gains: Mapping[str, Row], steps: tuple[int, int]) -> Iterator[str]:
    """A Markdown table: two lines for each kind of question."""
    yield "| questions | after step | right | call the calculator | right of those that call | gain |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for kind, its in found.items():
        difference = "{mean:+.0%} ({low:+.0%} to {high:+.0%})".format(**gains[kind])
        for when, step, gained in zip(WHEN, steps, ("", difference), strict=True):
            counts = its[when]
            pairs = (("right", "questions"), ("called", "questions"), ("right_with_call", "called"))
            shares = " | ".join(share(counts[part], counts[whole]) for part, whole in pairs)
            yield f"| {kind} | {step} | {shares} | {gained} |"


def share(part: int, whole: int) -> str:
    if whole == 0:
        return "0 of 0"
    low, high = wilson(part / whole, whole)
    return f"{part} of {whole} ({low:.1%} to {high:.1%})"


def shown(rows: Sequence[Row]) -> Iterator[str]:
    """Questions with all turns before and after."""
    for row in rows:
        yield f"\nQuestion: {row['question']} (answer: {row['answer']})"
        for when in WHEN:
            verdict = "right" if row[when]["right"] else "wrong"
            yield f"  {when}, {verdict}:"
            yield from (f"    {' '.join(turn.split())}" for turn in row[when]["turns"])


def write(path: Path, text: str) -> None:
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
