"""Which numbers are rewards: those that float32, in which advantages are computed, can hold."""

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from verl.rollout.finite import finite_number, finite_score
from verl.types import Score


@pytest.mark.parametrize(
    "value",
    [1, -2.5, np.float32(3e38), np.int64(4), True, np.True_, np.array(0.5), torch.tensor(2.0), Fraction(1, 3), 3.4e38],
)
def test_numbers_of_any_type(value: Any) -> None:
    assert finite_number(value) == pytest.approx(float(value))


@pytest.mark.parametrize(
    "value",
    [
        1e308,
        -3.5e38,
        10**400,
        np.inf,
        -np.inf,
        np.nan,
        np.array("1"),
        np.ones(1),
        torch.tensor(1e39, dtype=torch.float64),
        "1",
        None,
        Decimal(1),
        Fraction(10**40),
    ],
)
def test_a_value_that_is_not_finite_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="not a finite number of float32"):
        finite_number(value)


def test_parts_of_a_score_are_checked_too() -> None:
    assert finite_score(Score(1, {"part": np.float64(2)})) == Score(1.0, {"part": 2.0})
    with pytest.raises(ValueError, match="not a Score of finite numbers of float32"):
        finite_score(Score(1.0, {"part": 1e39}))


def test_names_of_parts_can_be_logged() -> None:
    assert finite_score(Score(1.0, {"größe": 2.0})).parts == {"größe": 2.0}
    with pytest.raises(ValueError, match=r"'\\ud800': 2\.0"):
        finite_score(Score(1.0, {"\ud800": 2.0}))
