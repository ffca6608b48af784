"""95 % intervals of differences of two means."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scipy.special import stdtrit

_QUANTILE = 0.975  # t distribution, two-sided 95 %


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def welch_half(first: Sequence[float], last: Sequence[float]) -> float:
    """Half of the interval for few values, whose variances may differ."""
    errors = [math.sqrt(_variance(values) / len(values)) for values in (first, last)]
    return half_interval(errors, [len(first), len(last)])


def half_interval(errors: Sequence[float], counts: Sequence[float]) -> float:
    """The same by the standard errors of both means, and the numbers of their values, infinite where not known.

    The t quantile has the degrees of freedom of Welch and Satterthwaite: (a + b)^2 / (a^2 / (n - 1) + b^2 / (m - 1)),
    where a and b are the variances of the means.
    """
    total = math.hypot(*errors)
    squares = sum(error**4 / (count - 1) for error, count in zip(errors, counts, strict=True))
    return float(stdtrit(total**4 / squares if squares else math.inf, _QUANTILE)) * total


def _variance(values: Sequence[float]) -> float:
    center = mean(values)
    return sum((value - center) ** 2 for value in values) / max(1, len(values) - 1)
