"""The metrics of a run as columns, with units and meanings, their marks, and its validations."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from toolrl.analysis.report.chunks import encoded, spread_order
from toolrl.analysis.report.folder import RunFolder
from toolrl.analysis.report.intervals import half_interval
from toolrl.analysis.report.rows import is_step, number
from verl.text import counted
from verl.tracking.names import METRICS, STDERR, Metric

_DIGITS = 6
_FREE = {"data_source", "set", "category"}  # placeholders that may hold slashes
GAP = 0.1  # nats between engine and trainer; a gap ends below half of it
MISSING = "missing"  # the tasks of a benchmark that could not be judged
SMOOTHING = 0.7  # share of the past in a smoothed curve
AXES = ("step", "time", "tokens")  # keys of `columns`
_VALIDATIONS = ("val/", "eval/")
Validated = tuple[str, float, float, float | None]  # a row of `validation`
MAX_STEPS = 5_000  # per curve
MAX_METRICS = 1_000
_FEWEST = 2  # steps of a curve
_NAME = 200  # characters of a metric's name


def columns(run: RunFolder) -> dict[str, list[float | None]]:
    """Every metric by step, None where it is missing; `step`, `time` in hours and `tokens` in millions first."""
    names = sorted({name for row in run.rows for name in row} - set(AXES))
    start = next((row["time"] for row in run.rows if number(row.get("time")) is not None), 0.0)
    tokens = accumulate(_tokens(row) for row in run.rows)
    return {
        "step": [row["step"] for row in run.rows],
        "time": [(number(row.get("time")) or start) / 3600 - start / 3600 for row in run.rows],
        "tokens": [total / 1e6 for total in tokens],
        **{name: [_round(number(row.get(name))) for row in run.rows] for name in names},
    }


def fitting_columns(run: RunFolder, room: int) -> tuple[dict[str, list[float | None]], list[str]]:
    """`columns` in so many characters of the page, and what is left out of them.

    Steps are left out evenly; those with a validation are the last.
    """
    table = columns(run)
    names = [name for name in table if len(name) <= _NAME][: MAX_METRICS + len(AXES)]
    validated = [any(name.startswith(_VALIDATIONS) for name in row) for row in run.rows]
    order = sorted(spread_order(len(run.rows)), key=lambda place: not validated[place])
    count = min(len(order), MAX_STEPS)
    while True:
        part = {name: [table[name][place] for place in sorted(order[:count])] for name in names}
        if count <= _FEWEST or len(encoded(part)) <= room:
            break
        count //= 2
    rules = [f"curves have {count} of {counted(len(order), 'step')}"] if count < len(order) else []
    if len(names) < len(table):
        rules.append(f"{len(names) - len(AXES)} of {counted(len(table) - len(AXES), 'metric')} are shown")
    return part, rules


def _round(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{_DIGITS}g}")


def _tokens(row: Mapping[str, Any]) -> float:
    return (number(row.get("perf/tokens_per_s")) or 0.0) * (number(row.get("time/step_s")) or 0.0)


def describe(name: str) -> Metric | None:
    """The entry of docs/metrics.md for a metric, the most specific one; None for one of the user's own.

    A part of a set or a data source that has an entry of its own (`swe/<stage>_s`) is described by that.
    """
    found = next((metric for metric in _MOST_SPECIFIC_FIRST if re.fullmatch(_pattern(metric.name), name)), None)
    if found is None or not found.name.endswith("/<part>"):
        return found
    pieces = name.split("/")
    parts = (describe("/".join(["reward", *pieces[start:]])) for start in range(2, len(pieces) - 1))
    return next((part for part in parts if part is not None and not part.name.endswith("/<part>")), found)


def _specificity(metric: Metric) -> tuple[int, int]:
    """Fewer placeholders come first, then more letters."""
    return metric.name.count("<"), -len(re.sub("<.*?>", "", metric.name))


_MOST_SPECIFIC_FIRST = sorted(METRICS, key=_specificity)


def _pattern(name: str) -> str:
    pieces = re.split(r"<(\w+)>", name)
    pieces[::2] = map(re.escape, pieces[::2])
    pieces[1::2] = [".+" if placeholder in _FREE else "[^/]+" for placeholder in pieces[1::2]]
    return "".join(pieces)


def validation(run: RunFolder) -> list[Validated]:
    """(metric, first value, last value, half of the 95 % interval of the change) of every validation metric.

    The interval takes both validations as independent, so it is wider than that of paired differences. There is none
    without a standard error, nor where all tasks have the same value in both.
    """
    scores, tasks, recorded = [], dict[int, Mapping[str, int]](), set(run.validated_steps())
    names = sorted({name for row in run.rows for name in row if name.startswith(_VALIDATIONS)})
    for name in sorted(names, key=_rank):
        rows = [row for row in run.rows if number(row.get(name)) is not None]
        if name.endswith(STDERR) or len(rows) < 2:
            continue
        ends = rows[0], rows[-1]
        errors = [error for row in ends if (error := number(row.get(name + STDERR))) is not None]
        half = None
        if len(errors) == 2 and any(errors):
            steps = [row["step"] for row in ends]
            tasks |= {step: _tasks(run, step) for step in steps if step in recorded and step not in tasks}
            half = half_interval(errors, [tasks.get(step, {}).get(name, math.inf) for step in steps])
        scores.append((name, float(rows[0][name]), float(rows[-1][name]), half))
    return scores


def _tasks(run: RunFolder, step: int) -> Mapping[str, int]:
    """The numbers of tasks behind the metrics of a validation that has left its responses; 2 at least."""
    tasks: dict[str, set[str]] = {}
    for row in run.validation(step):
        name, source = row.get("set"), row.get("data_source")
        for metric in ("total", "exact") if "exact" in row else ("total",):
            for key in (metric, f"{source}/{metric}"):
                tasks.setdefault(f"val/{name}/{key}", set()).add(str(row.get("task_id")))
    return {metric: len(its) for metric, its in tasks.items() if len(its) > 1}


def _rank(name: str) -> tuple[bool, int]:
    """Rewards of validation sets come first, then scores of benchmarks, counts of missing tasks, and single sources."""
    kind, *_, last = levels = name.split("/")
    return kind == "val" and len(levels) > 3, {"total": 0, "score": 1, "exact": 2, MISSING: 4}.get(last, 3)


def marks(run: RunFolder) -> list[dict[str, Any]]:
    """Collapse alarms, and where something begins: a triggered rule, a gap of engine and trainer, other staleness."""
    alarms = {  # once each: a run that stops in a step, and is resumed, may stop there again
        (each["step"], "; ".join(map(str, each["alarms"]))): None
        for each in run.alarms
        if is_step(each.get("step")) and isinstance(each.get("alarms"), list)
    }
    events = [{"step": step, "kind": "collapse", "text": text} for step, text in alarms]
    before: Mapping[str, Any] = {}
    apart = False
    for row in run.rows:
        gap = number(row.get("engine/logprob_diff_mean")) or 0.0
        began, apart = not apart and gap > GAP, gap > (GAP / 2 if apart else GAP)
        rules = [number(each.get("collapse/triggered_rules")) or 0.0 for each in (before, row)]
        depths = [number(each.get("staleness/depth")) for each in (before, row)]
        if rules[0] < rules[1]:
            events.append({"step": row["step"], "kind": "collapse", "text": "a collapse rule is triggered"})
        if began:
            events.append({"step": row["step"], "kind": "gap", "text": f"engine and trainer differ by over {GAP} nats"})
        if None not in depths and depths[0] != depths[1]:
            text = f"prompts are drawn {depths[1]:g} steps ahead, {depths[0]:g} before"
            events.append({"step": row["step"], "kind": "staleness", "text": text})
        before = row
    return events
