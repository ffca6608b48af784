"""Checks that scores are finite in float32, in which they are trained: NaN and infinities cannot be averaged."""

from collections.abc import Mapping
from dataclasses import replace
from numbers import Real

import numpy as np

from verl.types import Score

_LARGEST = float(np.finfo(np.float32).max)


def finite_number(value: object) -> float:
    """The number as a float, whichever library's type it has: NumPy's truths and arrays or tensors without axes, too.

    Raises ValueError if it is not finite in float32.
    """
    if isinstance(shape := getattr(value, "shape", None), tuple) and not shape:
        value = value.item()  # type: ignore[attr-defined]
    try:
        if isinstance(value, Real) and abs(number := float(value)) <= _LARGEST:  # false for NaN
            return number
    except OverflowError:
        pass
    raise ValueError(f"{value!r} is not a finite number of float32")


def finite_score(score: object) -> Score:
    """The score with all numbers as floats. Raises ValueError if one is not finite in float32."""
    try:
        if isinstance(score, Score) and isinstance(score.parts, Mapping):
            for name in score.parts:
                str(name).encode()  # a lone surrogate, which is no Unicode, could not be logged
            parts = {name: finite_number(value) for name, value in score.parts.items()}
            return replace(score, total=finite_number(score.total), parts=parts)
    except ValueError:
        pass
    raise ValueError(f"{score!r} is not a Score of finite numbers of float32")
