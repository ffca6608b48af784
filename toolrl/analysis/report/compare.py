"""Two validations of the same tasks: paired differences with intervals, and the tasks whose outcome flipped.

A report compares the first and the last validation of every run, and the last ones of the first run and each other.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from scipy.special import stdtrit

from toolrl.analysis.report.chunks import Chunks, encoded, encoded_bound, fitting, short, spread_part
from toolrl.analysis.report.folder import RunFolder
from toolrl.benchmarks.runner.stats import RESAMPLES, estimate

MAX_FLIPPED = 200  # tasks of a comparison, with their transcripts
_FEW = 30  # tasks; a bootstrap of fewer gives too narrow an interval
_ROUNDING = 1e-9  # relative
_SOLVED = 0.5  # share of a task's responses with the maximum reward
_DETAILS = ("prompt", "responses", "answer", "tool_uses", "score")
_Task = tuple[str, str]  # set, id of the task
_Rows = Mapping[_Task, Sequence[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedSet:
    """A validation set: means over the tasks of both sides, and 95 % of the mean paired difference if it has such."""

    name: str
    tasks: int
    before: float
    after: float
    low: float | None
    high: float | None
    solved: list[int]  # before, after
    gained: int
    lost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """flipped: set, task, solved after, rewards, and the chunk with a response of each side that has its outcome"""

    before: str
    after: str
    sets: list[PairedSet] = field(default_factory=list)
    flipped: list[dict[str, Any]] = field(default_factory=list)
    left_out: int = 0  # flipped tasks over the limits
    unpaired: int = 0  # tasks of one side only, or with another gold answer, or another prompt where data differ


def compare_runs(runs: Sequence[RunFolder], chunks: Chunks, room: int = sys.maxsize) -> list[Comparison]:
    """room: characters that all comparisons together may add to the page"""
    start = chunks.size
    ends = [(run, run.validated_steps()) for run in runs]
    pairs = [(run, steps[0], run, steps[-1]) for run, steps in ends if len(steps) > 1]
    (first, known), *others = ends
    pairs += [(first, known[-1], run, steps[-1]) for run, steps in others if known and steps]
    return [
        compare(
            _label(old, old_step),
            _read(old, old_step),
            _label(new, new_step),
            _read(new, new_step),
            chunks,
            same_data=old is new or _same_data(old, new),
            limit=start + room * number // len(pairs),
        )
        for number, (old, old_step, new, new_step) in enumerate(pairs, 1)
    ]


def _label(run: RunFolder, step: int) -> str:
    return f"{run.name}, step {step}"


def _read(run: RunFolder, step: int) -> _Rows:
    """The responses of each task."""
    tasks: dict[_Task, list[Mapping[str, Any]]] = {}
    for row in run.validation(step):
        tasks.setdefault((str(row.get("set")), str(row.get("task_id"))), []).append(row)
    return tasks


def _same_data(old: RunFolder, new: RunFolder) -> bool:
    before, after = data_files([old, new])
    return before == after != {}


def compare(
    before: str,
    old: _Rows,
    after: str,
    new: _Rows,
    chunks: Chunks,
    same_data: bool = False,
    limit: int = sys.maxsize,
) -> Comparison:
    """The transcripts of flipped tasks are added to the chunks, up to a limit of their size.

    before, after: names of the sides; same_data: equal ids are equal tasks, although a prompt template may differ
    """
    same = ("answer",) if same_data else ("answer", "prompt")
    both = [
        task for task in old if task in new and all(old[task][0].get(name) == new[task][0].get(name) for name in same)
    ]
    comparison = Comparison(
        before=before,
        after=after,
        sets=[_pair(name, [task for task in both if task[0] == name], old, new) for name in _sets(both)],
        unpaired=len(old) + len(new) - 2 * len(both),
    )
    chunks.size += len(encoded(asdict(comparison)))
    flips = [task for task in both if _solved(old[task]) != _solved(new[task])]
    flips.sort(key=lambda task: _reward(new[task]) - _reward(old[task]))
    shown = [_flips(task, old, new, chunks, limit) for task in spread_part(flips, MAX_FLIPPED)]
    fitting = [each for each in shown if each is not None]
    return replace(comparison, flipped=fitting, left_out=len(flips) - len(fitting))


def _flips(task: _Task, old: _Rows, new: _Rows, chunks: Chunks, limit: int) -> dict[str, Any] | None:
    """None if its transcripts do not fit."""
    row = {
        "set": short(task[0]),
        "task": short(task[1]),
        "solved": _solved(new[task]),
        "rewards": [_reward(side[task]) for side in (old, new)],
        "chunk": len(chunks.texts),
    }
    details = encoded([_details(side[task]) for side in (old, new)])
    return None if chunks.add(details, limit, encoded_bound(row)) is None else row


def _sets(tasks: Sequence[_Task]) -> list[str]:
    return list(dict.fromkeys(name for name, _ in tasks))


def _pair(name: str, tasks: Sequence[_Task], old: _Rows, new: _Rows) -> PairedSet:
    before, after = ([_reward(side[task]) for task in tasks] for side in (old, new))
    differences = [late - early for early, late in zip(before, after, strict=True)]
    low, high = _interval(name, differences)
    solved = [[_solved(side[task]) for task in tasks] for side in (old, new)]
    changes = list(zip(*solved, strict=True))
    return PairedSet(
        name=str(short(name)),
        tasks=len(tasks),
        before=fmean(before),
        after=fmean(after),
        low=low,
        high=high,
        solved=[sum(side) for side in solved],
        gained=changes.count((False, True)),
        lost=changes.count((True, False)),
    )


def _interval(name: str, differences: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    """95 % of the mean: by a bootstrap; of few differences, by the t distribution.

    None where all are equal: either way would give a width of 0, and claim a certainty that no number of tasks gives.
    """
    count = len(differences)
    spread = stdev(differences) if count > 1 else 0.0
    if spread <= _ROUNDING * max(map(abs, differences)):
        return None, None
    if count >= _FEW:
        return estimate(name, differences, RESAMPLES).interval
    mean, half = fmean(differences), float(stdtrit(count - 1, 0.975)) * spread / math.sqrt(count)
    return mean - half, mean + half


def _reward(rows: Sequence[Mapping[str, Any]]) -> float:
    return fmean(row["score"]["total"] for row in rows)


def _solved(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether half of the responses have the maximum reward; a positive one, where the reward defines no maximum."""
    return fmean(map(_time_to_reach, rows)) >= _SOLVED


def _time_to_reach(row: Mapping[str, Any]) -> float:
    return float(row["exact"] if "exact" in row else row["score"]["total"] > 0)


def _details(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The first response with the outcome of its side, and which of how many it is."""
    reached = [_time_to_reach(row) for row in rows]
    chosen = reached.index(max(reached) if _solved(rows) else min(reached))
    return {
        **{name: rows[chosen][name] for name in _DETAILS if name in rows[chosen]},
        "response": chosen + 1,
        "num_responses": len(rows),
    }


def differences(runs: Sequence[RunFolder], room: int = sys.maxsize) -> dict[str, list[list[Any]]]:
    """[name, value of each run, ..] of what differs in settings, data and code; None where it is missing.

    room: characters for each of the three
    """
    return {
        "settings": _differing([run.settings for run in runs], room),
        "data": _differing(data_files(runs), room),
        "code": _differing([run.code for run in runs], room),
    }


def _differing(sides: Sequence[Mapping[str, Any]], room: int) -> list[list[Any]]:
    names = sorted({name for side in sides for name in side})
    rows = [[name, *(side.get(name) for side in sides)] for name in names]
    differing = [row for row in rows if any(value != row[1] for value in row[2:])]
    shown = fitting([list(map(short, row)) for row in differing], room)
    more = [f"{len(differing) - len(shown)} more", *[None] * len(sides)]
    return shown + [more] * (len(shown) < len(differing))


def data_files(runs: Sequence[RunFolder]) -> list[dict[str, str]]:
    """Digest or commit of the data files of every run, by name.

    Folders differ from machine to machine, so a name has only those that distinguish the files of one run.
    """
    parts: dict[str, int] = {}
    for run in runs:
        named: dict[str, list[tuple[str, ...]]] = {}
        for path in map(Path, run.data):
            named.setdefault(path.name, []).append(path.parts)
        for name, paths in named.items():
            parts[name] = max(parts.get(name, 1), _parts_apart(paths))
    return [
        {str(Path(*Path(source).parts[-parts[Path(source).name] :])): version for source, version in run.data.items()}
        for run in runs
    ]


def _parts_apart(paths: Sequence[tuple[str, ...]]) -> int:
    """Last parts with which the paths differ."""
    most = max(map(len, paths))
    return next((count for count in range(1, most) if len({path[-count:] for path in paths}) == len(paths)), most)
