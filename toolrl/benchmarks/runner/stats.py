"""Estimates with confidence intervals: a percentile bootstrap over tasks (Efron, 1979), also for aggregates and
differences; Wilson's interval of a share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from zlib import crc32

import numpy as np
import numpy.typing as npt

from toolrl.benchmarks.runner.benchmark import Aggregate

RESAMPLES = 2000  # per interval, where nothing else is asked for
_BETWEEN = (2.5, 97.5)  # percentiles: 95 % of the resampled means
_CHUNK = 64  # resamples drawn at once
_Z = 1.96  # of a 95 % interval


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks, and its bootstrap distribution."""

    mean: float
    resampled: npt.NDArray[np.float64]  # [resamples]
    num_rows: int

    @property
    def interval(self) -> tuple[float, float]:
        low, high = np.percentile(self.resampled, _BETWEEN)
        return float(low), float(high)

    def as_dict(self) -> dict[str, float]:
        low, high = self.interval
        return {"mean": self.mean, "low": low, "high": high}


def estimate(name: str, values: Sequence[float], resamples: int) -> Estimate:
    """The mean of one value per task. The name seeds the resampling, so that intervals are reproducible."""
    array = np.asarray(values, dtype=np.float64)
    random = np.random.default_rng(crc32(name.encode()))
    means = np.empty(resamples)
    for start in range(0, resamples, _CHUNK):
        size = min(_CHUNK, resamples - start)
        means[start : start + size] = array[random.integers(len(array), size=(size, len(array)))].mean(axis=1)
    return Estimate(float(array.mean()), means, len(array))


def wilson(share: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a share of this many (Wilson, 1927); it is not empty for a share of 0 or 1."""
    scale = 1 + _Z**2 / count
    middle = (share + _Z**2 / (2 * count)) / scale
    half = _Z * sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2)) / scale
    return max(0.0, middle - half), min(1.0, middle + half)


def aggregate(aggregates: Sequence[Aggregate], scores: Mapping[str, Estimate]) -> dict[str, Estimate]:
    """The aggregates of these scores, in order; those with a member that was not run are left out."""
    known = dict(scores)
    estimates: dict[str, Estimate] = {}
    for each in aggregates:
        if all(member in known for member in each.members):
            members = [known[member] for member in each.members]
            rows = np.array([member.num_rows for member in members], dtype=np.float64)
            weights = rows / rows.sum() if each.over == "rows" else np.full(len(members), 1 / len(members))
            mean = sum(weight * member.mean for weight, member in zip(weights, members, strict=True))
            resampled = weights @ np.stack([member.resampled for member in members])
            estimates[each.name] = known[each.name] = Estimate(float(mean), resampled, int(rows.sum()))
    return estimates
