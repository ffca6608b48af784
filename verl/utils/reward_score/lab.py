"""The reward lab: prove a reward on your own data before spending a GPU hour on it.

    python -m verl.utils.reward_score.lab --data train.parquet [--reward rlla] [--limit N] [--option key=value ..]

For every row the gold reply must score the maximum, and every mutation that the reward declares must score less. Rows
that cannot be read offend too. Prints a table per mutation and the offending rows; exits with 1 if there are any, with
2 if the data or the reward cannot be used at all.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from verl.data.tasks import TaskSet
from verl.errors import ConfigError, VerlError
from verl.types import Completion, FinishReason, Message, Outcome, Task, Trajectory, Turn
from verl.utils.reward_score.base import LabReward, build_reward

GOLD = "gold"
_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Offence:
    """A row on which the reward breaks its promise."""

    task: Task
    reply_kind: str  # GOLD or the name of a mutation
    score: float
    maximum: float
    text: str

    def __str__(self) -> str:
        fault = "scores below" if self.reply_kind == GOLD else "scores"
        return f"{self.task.id}: {self.reply_kind} {fault} the maximum: {self.score:g} of {self.maximum:g}"


@dataclass
class LabReport:
    """What the lab saw: per kind of reply all scores and how many of them were at the row's maximum."""

    scores: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    at_maximum: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    offences: list[Offence] = field(default_factory=list)


def as_trajectory(task: Task, reply: str) -> Trajectory:
    """A finished single-turn episode in which the policy wrote `reply`."""
    completion = Completion(token_ids=(), logprobs=(), finish_reason=FinishReason.STOP, weight_version=0)
    turn = Turn(prompt_ids=(), completion=completion, message=Message("assistant", reply))
    return Trajectory(task, index=0, turns=(turn,), stop_reason="stop", num_tool_calls=0, outcome=Outcome.SCORED)


def try_reward(reward: LabReward, tasks: Iterable[Task], step: int = 0) -> LabReport:
    """Score the gold reply and every mutation of every task."""
    report = LabReport()
    for task in tasks:
        maximum = reward.maximum(task, step)
        replies = [(GOLD, reward.gold(task, step))]
        replies += [(mutation.name, mutation.text) for mutation in reward.mutations(task, step)]
        for kind, text in replies:
            score = reward.score(as_trajectory(task, text), task, step).total
            at_maximum = math.isclose(score, maximum, abs_tol=_TOLERANCE)
            report.scores[kind].append(score)
            report.at_maximum[kind] += at_maximum
            if at_maximum != (kind == GOLD):
                report.offences.append(Offence(task, kind, score, maximum, text))
    return report


def _table(report: LabReport) -> Table:
    table = Table(title="Reward lab")
    for column in ("reply", "rows", "mean", "min", "max", "at maximum"):
        table.add_column(column, justify="left" if column == "reply" else "right")
    for kind, scores in report.scores.items():
        share = report.at_maximum[kind] / len(scores)
        broken = share < 1.0 if kind == GOLD else share > 0.0
        row = [str(len(scores)), f"{sum(scores) / len(scores):.3f}", f"{min(scores):.3f}", f"{max(scores):.3f}"]
        table.add_row(kind, *row, f"{share:.1%}", style="red" if broken else None)
    return table


def _option(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not key=value")
    try:
        return key, json.loads(value)  # numbers, true, false, null
    except ValueError:
        return key, value


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m verl.utils.reward_score.lab", description="Prove a reward on data."
    )
    parser.add_argument("--data", required=True, help="parquet or jsonl file of tasks")
    parser.add_argument("--reward", default="rlla", help="a known reward, or module:attribute, or file.py:attribute")
    parser.add_argument("--option", type=_option, action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--limit", type=int, help="look at the first N rows only")
    parser.add_argument("--step", type=int, default=0, help="training step, for scheduled rewards")
    parser.add_argument("--show", type=int, default=20, help="how many offending rows to list")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the lab; returns the exit code."""
    arguments = _arguments(argv)
    console = Console()
    try:
        reward = build_reward(arguments.reward, dict(arguments.option))
        if not isinstance(reward, LabReward):
            raise ConfigError(f"reward {arguments.reward!r} brings no maximum(), gold() and mutations() to try")
        tasks = TaskSet(arguments.data, on_bad_row="skip")
        count = min(len(tasks), arguments.limit or len(tasks))
        report = try_reward(reward, track(islice(tasks, count), "Scoring", count, console=console), arguments.step)
    except VerlError as error:
        console.print(f"[red]{type(error).__name__}[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        return 2
    console.print(_table(report))
    for offence in report.offences[: arguments.show]:
        console.print(escape(str(offence)), highlight=False, soft_wrap=True)
    hidden = len(report.offences) - arguments.show
    if hidden > 0:
        console.print(f"... and {hidden} more (--show {len(report.offences)} lists all)")
    rows = len({offence.task.id for offence in report.offences})
    console.print(f"{count} rows tried, {rows} with offences; {len(tasks.bad_rows)} rows unreadable")
    return 1 if report.offences or tasks.bad_rows else 0


if __name__ == "__main__":
    sys.exit(main())
