"""Scores that are finite: what is none can be neither averaged nor kept as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from numbers import Real

from verl.types import Score


def finite_number(value: object) -> float:
    """The number as a float, whichever library's it is. Raises ValueError for what is none, or is not finite."""
    try:
        if isinstance(value, Real) and math.isfinite(value):
            return float(value)
    except OverflowError:
        pass
    raise ValueError(f"{value!r} is no finite number")


def finite_score(score: object) -> Score:
    """The score in floats. Raises ValueError for one without."""
    problem = f"{score!r} is no Score of finite numbers"
    if not isinstance(score, Score) or not isinstance(score.parts, Mapping):
        raise ValueError(problem)
    try:
        parts = {name: finite_number(value) for name, value in score.parts.items()}
        return replace(score, total=finite_number(score.total), parts=parts)
    except ValueError as error:
        raise ValueError(problem) from error
