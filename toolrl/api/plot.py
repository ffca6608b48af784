"""Curves of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

from verl.errors import ConfigError
from verl.registry import nearest

try:
    from matplotlib.figure import Figure
except ModuleNotFoundError as error:
    raise ConfigError("plots need the package matplotlib; pip install matplotlib") from error

_COLUMNS = 2
_SIZE = (5.0, 2.6)  # size of a curve in inches


class Plot(Figure):
    """A figure that a notebook displays without pyplot, which would keep it in memory."""

    def _repr_png_(self) -> bytes:
        file = BytesIO()
        self.savefig(file, format="png", bbox_inches="tight")
        return file.getvalue()


def plot(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Plot:
    """A curve per metric over the steps. Raises ConfigError for a metric that no step has."""
    known = list(dict.fromkeys(name for row in rows for name in row))
    for name in names:
        if name not in known:
            raise ConfigError(f"no step has the metric {name!r}; {nearest(name, known)}")
    columns = min(len(names), _COLUMNS) or 1
    lines = -(-len(names) // columns) or 1
    figure = Plot(figsize=(columns * _SIZE[0], lines * _SIZE[1]), layout="constrained")
    for number, name in enumerate(names, 1):
        points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        axes = figure.add_subplot(lines, columns, number, title=name, xlabel="step")
        axes.plot(*zip(*points, strict=True) if points else ((), ()), marker=".")
    return figure
