"""Figures with intervals: a percentile bootstrap over tasks (Efron, 1979), for aggregates and differences, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np
import numpy.typing as npt

from verl.evaluation.base import Aggregate

_BETWEEN = (2.5, 97.5)  # percentiles: 95 % of the resampled means
_CHUNK = 64  # resamples that are drawn at once


@dataclass(frozen=True, slots=True)
class Figure:
    """A mean over tasks, and what it would have been on other tasks of the same kind."""

    mean: float
    resampled: npt.NDArray[np.float64]  # [resamples]
    num_rows: int

    @property
    def interval(self) -> tuple[float, float]:
        """Where 95 % of the resampled means lie."""
        low, high = np.percentile(self.resampled, _BETWEEN)
        return float(low), float(high)

    def told(self) -> dict[str, float]:
        """For a JSON file."""
        low, high = self.interval
        return {"mean": self.mean, "low": low, "high": high}


def estimate(name: str, values: Sequence[float], resamples: int) -> Figure:
    """The mean of one value for each task. Tasks are drawn with a seed that is the name, so that figures repeat."""
    found = np.asarray(values, dtype=np.float64)
    random = np.random.default_rng(crc32(name.encode()))
    means = np.empty(resamples)
    for start in range(0, resamples, _CHUNK):
        size = min(_CHUNK, resamples - start)
        means[start : start + size] = found[random.integers(len(found), size=(size, len(found)))].mean(axis=1)
    return Figure(float(found.mean()), means, len(found))


def aggregate(aggregates: Sequence[Aggregate], figures: Mapping[str, Figure]) -> dict[str, Figure]:
    """The aggregates that can be made of these figures, in order; those with a member that was not run are left out."""
    known = dict(figures)
    made: dict[str, Figure] = {}
    for each in aggregates:
        if all(member in known for member in each.members):
            made[each.name] = known[each.name] = _combine(each, [known[member] for member in each.members])
    return made


def _combine(how: Aggregate, members: Sequence[Figure]) -> Figure:
    rows = np.array([member.num_rows for member in members], dtype=np.float64)
    weights = rows / rows.sum() if how.over == "rows" else np.full(len(members), 1 / len(members))
    mean = sum(weight * member.mean for weight, member in zip(weights, members, strict=True))
    resampled = weights @ np.stack([member.resampled for member in members])
    return Figure(float(mean), resampled, int(rows.sum()))
