"""The curves of runs as PNG files, one per family of metrics (`reward.png`, `time.png` ..), for papers and chats."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from toolrl.analysis.report.curves import AXES, SMOOTHING, columns, describe, marks
from toolrl.analysis.report.folder import RunFolder
from verl.errors import ConfigError
from verl.host.files import replacing
from verl.text import printable

_ROW = 3  # curves beside each other
_SIZE = (4.2, 2.7)  # size of a curve in inches
_MOST = 60  # curves of a picture
_FAMILY = 100  # characters of a file's name
_LARGEST = 1e100  # matplotlib computes with squares and sums of values
_HUES = ("#2f7de1", "#e0762f", "#2fa866", "#b04fd0", "#d03f5c", "#8a8f2a", "#1fa3a3", "#96644a")
_MARKS = {"collapse": "#c0392b", "gap": "#0b62c4", "staleness": "#5c6370"}


def write_pngs(runs: Sequence[RunFolder], folder: Path) -> list[Path]:
    """Write the curves of all metrics over the steps, raw and smoothed. Raises ConfigError or DataError."""
    try:
        from matplotlib.figure import Figure  # from the optional extra; without pyplot, no display is needed
    except ModuleNotFoundError as error:
        raise ConfigError("--png needs the package matplotlib: pip install 'toolrl[plot]'") from error
    tables = [columns(run) for run in runs]
    families: dict[str, list[str]] = {}
    for name in sorted({name for table in tables for name in table if name not in AXES}):
        families.setdefault(re.sub(r"[^\w-]", "_", name.split("/")[0])[:_FAMILY], []).append(name)
    paths = []
    for family, names in _pictures(families):
        size = (_SIZE[0] * min(len(names), _ROW), _SIZE[1] * -(-len(names) // _ROW))
        figure = Figure(figsize=size, layout="constrained")
        for number, name in enumerate(names, 1):
            axes = figure.add_subplot(-(-len(names) // _ROW), min(len(names), _ROW), number)
            _draw(axes, name, runs, tables)
        paths.append(folder / f"{family}.png")
        with replacing(paths[-1]) as unfinished:
            figure.savefig(unfinished, dpi=100, format="png")
    return paths


def _pictures(families: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, Sequence[str]]]:
    """(name of the picture, its metrics): `reward`, and `reward-2` with those that the first has no room for."""
    for family, names in families.items():
        for number, start in enumerate(range(0, len(names), _MOST), 1):
            yield family if number == 1 else f"{family}-{number}", names[start : start + _MOST]


def _draw(axes: Any, name: str, runs: Sequence[RunFolder], tables: Sequence[Any]) -> None:
    from matplotlib.ticker import MaxNLocator

    described = describe(name)
    unit = "" if described is None or described.unit == "1" else described.unit
    axes.set_title(printable(name), fontsize=9, parse_math=False)
    axes.set_ylabel(unit, fontsize=8, parse_math=False)
    axes.set_xlabel("step", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))  # there is no step 2.5
    axes.grid(alpha=0.3)
    for number, (run, table) in enumerate(zip(runs, tables, strict=True)):
        hue = _HUES[number % len(_HUES)]
        pairs = zip(table["step"], table.get(name, ()), strict=False)
        points = [(step, value) for step, value in pairs if value is not None and abs(value) < _LARGEST]
        steps, values = [step for step, _ in points], [value for _, value in points]
        axes.plot(steps, values, color=hue, alpha=0.35, linewidth=1, marker="." if len(points) < 40 else None)
        axes.plot(steps, smoothed(name, values), color=hue, linewidth=1.6)
        for mark in marks(run):
            axes.axvline(mark["step"], color=_MARKS[mark["kind"]], linestyle="--", linewidth=0.8)
        if len(runs) > 1:
            place = {"va": "top", "transform": axes.transAxes}
            axes.text(0.02, 0.98 - 0.1 * number, printable(run.name), color=hue, fontsize=8, parse_math=False, **place)


def smoothed(name: str, values: Sequence[float]) -> list[float]:
    """As on the page: the exponential mean of a metric; validations as they are."""
    if name.startswith(("val/", "eval/")):
        return list(values)
    return list(accumulate(values, lambda last, value: SMOOTHING * last + (1 - SMOOTHING) * value))
