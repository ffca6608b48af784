"""Checks that scores are finite: NaN and infinities can be neither averaged nor stored as JSON."""

import math
from collections.abc import Mapping
from dataclasses import replace
from numbers import Real

from verl.types import Score


def finite_number(value: object) -> float:
    """The number as a float, whichever library's type it has. Raises ValueError if it is not a finite number."""
    try:
        if isinstance(value, Real) and math.isfinite(value):
            return float(value)
    except OverflowError:
        pass
    raise ValueError(f"{value!r} is not a finite number")


def finite_score(score: object) -> Score:
    """The score with all numbers as floats. Raises ValueError if one is not finite."""
    try:
        if isinstance(score, Score) and isinstance(score.parts, Mapping):
            parts = {name: finite_number(value) for name, value in score.parts.items()}
            return replace(score, total=finite_number(score.total), parts=parts)
    except ValueError:
        pass
    raise ValueError(f"{score!r} is not a Score of finite numbers")
