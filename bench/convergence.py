"""Row 15: loss of final reward through stale samples, from the runs of bench/convergence.sh. Lower is better.

    python bench/convergence.py outputs/convergence/composed

Reads every finished run below the folder (k<rollout.max_staleness>_seed<seed>/metrics.jsonl). For each k it reports
the final reward, steps and seconds to fixed rewards, time per step and staleness; for k=0 and k=1 the difference of
their final rewards, paired over seeds, with its 95 % t interval. Rewards are greedy validation rewards, interpolated
linearly between validations. Seconds are wall time since the validation before training, including later validations,
during which asynchronous rollouts continue.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import Result, console, report
from scipy.stats import t as student

from verl.tracking.jsonl import read_jsonl

MAX_SHORTFALL = 0.15  # of k=1 relative to k=0, on a scale of -3 to 4
LEVELS = {"composed": (1.5, 1.75, 2.0), "tool_loop": (-0.5, 0.0, 0.5)}  # reward levels for time-to-reward
_NAME = re.compile(r"k(\d+)_seed(\d+)")


@dataclass(frozen=True)
class Point:
    """A validation."""

    step: float
    seconds: float
    reward: float


@dataclass(frozen=True)
class Run:
    """metrics.jsonl of one run: one row per step, after one for the initial validation."""

    rows: Sequence[Mapping[str, Any]]

    @property
    def points(self) -> list[Point]:
        """Validation rewards by step and time."""
        [name] = {name for row in self.rows for name in row if re.fullmatch("val/[^/]+/total", name)}
        began = self.rows[0]["time"]
        return [Point(row["step"], row["time"] - began, row[name]) for row in self.rows if name in row]

    def mean(self, name: str) -> float:
        """The mean of a metric over the steps; 0 if absent, NaN if a value is not a number."""
        values = [math.nan if row[name] is None else row[name] for row in self.rows[1:] if name in row]
        return statistics.fmean(values) if values else 0.0

    def step_s(self) -> float:
        """The median time per step."""
        return statistics.median(row["time/step_s"] for row in self.rows[1:])


Runs = Mapping[int, Mapping[int, Run]]  # by staleness, by seed
COLUMNS: Mapping[str, Callable[[Run], float]] = {
    "s a step": Run.step_s,
    "staleness": lambda run: run.mean("staleness/mean"),
    "ESS": lambda run: run.mean("correction/ess"),
    "mismatch KL, millinats": lambda run: 1000 * run.mean("correction/engine_kl"),
    "gradient norm": lambda run: run.mean("actor/grad_norm"),
}


def read_runs(folder: Path) -> Runs:
    """The finished runs. Exits if their numbers of steps differ, or if there are none."""
    runs: dict[int, dict[int, Run]] = {}
    for done in sorted(folder.glob("k*_seed*/done")):
        if named := _NAME.fullmatch(done.parent.name):
            staleness, seed = map(int, named.groups())
            runs.setdefault(staleness, {})[seed] = Run(read_jsonl(done.with_name("metrics.jsonl")))
    lengths = {run.rows[-1]["step"] for seeds in runs.values() for run in seeds.values()}
    if len(lengths) != 1:
        found = f"finished runs of {sorted(lengths)} steps" if lengths else "no finished runs"
        raise SystemExit(f"{folder}: {found}; expected runs with equal numbers of steps: use another OUT")
    return dict(sorted(runs.items()))


def reached(points: Sequence[Point], reward: float) -> Point | None:
    """The first point where the interpolated reward reaches `reward`; None if it never does."""
    if points[0].reward >= reward:
        return points[0]
    for before, after in pairwise(points):
        if after.reward >= reward:
            share = (reward - before.reward) / (after.reward - before.reward)
            step = before.step + share * (after.step - before.step)
            return Point(step, before.seconds + share * (after.seconds - before.seconds), reward)
    return None


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """The 95 % t interval of the mean of at least two."""
    mean, error = statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(len(differences))
    half = float(student.ppf(0.975, len(differences) - 1)) * error
    return mean - half, mean + half


def shortfalls(runs: Runs, staleness: int) -> dict[int, float]:
    """By seed, the final reward of k=0 minus that of k=staleness."""
    theirs, ours = runs.get(0, {}), runs.get(staleness, {})
    return {seed: theirs[seed].points[-1].reward - ours[seed].points[-1].reward for seed in theirs if seed in ours}


def curves(runs: Runs) -> list[list[str]]:
    """Table of mean rewards by step and time."""
    some = next(iter(runs.values()))
    steps = [point.step for point in next(iter(some.values())).points]
    table = [["k", "seeds", *(f"step {step:g}" for step in steps)]]
    for staleness, seeds in runs.items():
        validations = zip(*(run.points for run in seeds.values()), strict=True)
        cells = [f"{_mean(p.reward for p in at):.2f} ({_mean(p.seconds for p in at):.0f} s)" for at in validations]
        table.append([str(staleness), " ".join(map(str, sorted(seeds))), *cells])
    return table


def summary(runs: Runs, levels: Sequence[float]) -> list[list[str]]:
    """Table of results by k."""
    table = [["k", "final reward", *(f"steps (s) to {level:g}" for level in levels), *COLUMNS]]
    for staleness, seeds in runs.items():
        finals = [run.points[-1].reward for run in seeds.values()]
        spread = f" (sd {statistics.stdev(finals):.2f})" if len(finals) > 1 else ""
        table.append(
            [
                str(staleness),
                f"{_mean(finals):.3f}{spread}",
                *(_format_reached([reached(run.points, level) for run in seeds.values()]) for level in levels),
                *(
                    f"{round(_mean(each(run) for run in seeds.values()), 3) + 0.0:.3g}"  # no -0
                    for each in COLUMNS.values()
                ),
            ]
        )
    return table


def _format_reached(points: Sequence[Point | None]) -> str:
    """Mean step and seconds over the runs that reached the level, with their number if not all."""
    there = [point for point in points if point is not None]
    if not there:
        return "never"
    share = "" if len(there) == len(points) else f", {len(there)} of {len(points)}"
    return f"{_mean(point.step for point in there):.1f} ({_mean(point.seconds for point in there):.0f}{share})"


def _mean(values: Any) -> float:
    return statistics.fmean(values)


def markdown(table: Sequence[Sequence[str]]) -> str:
    """A table for docs/benchmarks.md."""
    head, *rows = table
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def main() -> None:
    """Compare and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what bench/convergence.sh wrote: OUT/composed or OUT/tool_loop")
    parser.add_argument("--rounds", type=int, help="ignored")
    folder = parser.parse_args().folder
    runs = read_runs(folder)
    for table in (curves(runs), summary(runs, LEVELS.get(folder.name, ()))):
        console.print(markdown(table), soft_wrap=True, highlight=False, markup=False)
    for staleness in runs:
        if staleness and (found := shortfalls(runs, staleness)):
            pairs = ", ".join(f"{each:+.3f}" for each in found.values())
            line = f"k=0 - k={staleness}: {_mean(found.values()):+.3f}, {_format_interval(found)}: {pairs}"
            console.print(line, soft_wrap=True, highlight=False)
    if found := shortfalls(runs, 1):
        report(result(folder.name, runs, found))


def result(what: str, runs: Runs, found: Mapping[int, float]) -> Result:
    """The row for k=1 against k=0, over their common seeds."""
    sides = [
        {
            "final reward": _mean(runs[staleness][seed].points[-1].reward for seed in found),
            "s a step": _mean(runs[staleness][seed].step_s() for seed in found),
        }
        for staleness in (1, 0)
    ]
    return Result(
        row=15,
        name=f"final reward, max_staleness=0 minus 1, {what}",
        ratio=_mean(found.values()),
        target=MAX_SHORTFALL,
        ours=sides[0],
        theirs=sides[1],
        lower_is_better=True,
        note=_format_interval(found),
    )


def _format_interval(found: Mapping[int, float]) -> str:
    if len(found) < 2:
        return "one pair, no interval"
    low, high = interval(list(found.values()))
    return f"{len(found)} pairs, 95 % t interval {low:+.3f} to {high:+.3f}"


if __name__ == "__main__":
    main()
