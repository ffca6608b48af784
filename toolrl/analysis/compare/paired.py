"""The difference of two settings, each trained from several seeds and scored on the same rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from scipy.special import stdtr, stdtrit

Scores = Mapping[Any, float]  # by row
_POWER = 0.8


@dataclass(frozen=True, slots=True)
class Difference:
    """mean: of rows and seeds, both drawn from many; error: its standard error; freedom: degrees of freedom"""

    mean: float
    error: float
    freedom: float

    @property
    def p(self) -> float:
        """Two-sided."""
        if not self.error:
            return float(self.mean == 0)
        return float(2 * stdtr(self.freedom, -abs(self.mean) / self.error))

    @property
    def interval(self) -> tuple[float, float]:
        """95 %."""
        half = float(stdtrit(self.freedom, 0.975)) * self.error
        return self.mean - half, self.mean + half

    @property
    def detectable(self) -> float:
        """The true difference that is found in 80 % of such studies, at 5 %."""
        return float(stdtrit(self.freedom, 0.975) + stdtrit(self.freedom, _POWER)) * self.error


def difference(ours: Sequence[Scores], base: Sequence[Scores]) -> Difference:
    """Paired by seed, in the same order, and by row. Two seeds and two rows are needed.

    The variance of the mean is that over rows plus that over seeds, with Satterthwaite's degrees of freedom. It counts
    the noise of single scores twice, so p is rather too large.
    """
    seeds = [{row: scores[row] - other[row] for row in other} for scores, other in zip(ours, base, strict=True)]
    by_seed = [fmean(each.values()) for each in seeds]
    by_row = [fmean(each[row] for each in seeds) for row in seeds[0]]
    errors = [(stdev(each) / math.sqrt(len(each)), len(each)) for each in (by_seed, by_row)]
    variance = sum(error**2 for error, _ in errors)
    fourth = sum(error**4 / (count - 1) for error, count in errors)
    freedom = variance**2 / fourth if fourth else float(len(by_seed) - 1)
    return Difference(fmean(by_seed), math.sqrt(variance), freedom)


def holm(values: Sequence[float]) -> list[float]:
    """The p-values, corrected for their number (Holm 1979): in order, each times how many are not smaller."""
    order = sorted(range(len(values)), key=values.__getitem__)
    corrected, largest = [0.0] * len(values), 0.0
    for place, number in enumerate(order):
        largest = max(largest, min(1.0, values[number] * (len(values) - place)))
        corrected[number] = largest
    return corrected
