"""What a plain function may return as a score."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from verl.errors import ConfigError
from verl.types import Score
from verl.utils.reward_score.base import build_reward
from verl.utils.reward_score.functions import as_score


@pytest.mark.parametrize(
    "value", [0.5, np.float32(0.5), np.float64(0.5), np.array(0.5), torch.tensor(0.5), torch.tensor([0.5])], ids=repr
)
def test_scalars_of_any_library_are_numbers(value: Any) -> None:
    score = as_score(value, "mine")
    assert score == Score(0.5, {}) and type(score.total) is float
    assert as_score({"score": value, "right": True, "n": np.int64(2)}, "mine").parts["n"] == 2.0


@pytest.mark.parametrize(
    "value",
    [
        None,
        "0.5",
        [0.5],
        {"right": 1.0},
        {"score": "1"},
        (),
        ("1", 1.0),
        torch.zeros(2),
        np.zeros(2),
        1 + 2j,
        float("nan"),
        {"score": 1.0, "right": np.float32("inf")},
    ],
    ids=repr,
)
def test_anything_else_is_an_error_that_names_the_function(value: Any) -> None:
    with pytest.raises(TypeError) as caught:
        as_score(value, "mine")
    text = str(caught.value)
    expected = "a finite number, or a dict with 'score', the total, whose numbers are finite"
    assert text == f"mine returned {value!r}; expected {expected}"


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ("", "too many positional arguments"),
        ("response, answer, row", "missing a required argument: 'row'"),
        ("**columns", "too many positional arguments"),
        ("solution_str, ground_truth", "got an unexpected keyword argument 'data_source'"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_the_run(
    parameters: str, problem: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(f"def mine({parameters}):\n    return 1.0\n")
    with pytest.raises(
        ConfigError, match=rf"mine' is a function of other parameters than \(response, answer\).*{problem}"
    ):
        build_reward(f"{tmp_path / 'mine.py'}:mine")


def test_a_class_without_score_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Mine:\n    pass\n")
    with pytest.raises(ConfigError, match=r"Mine' is a class without `score"):
        build_reward(f"{tmp_path / 'mine.py'}:Mine")


@pytest.mark.parametrize("parameters", ["a, b", "*texts", "a, b, c=1", "completions, level", "solution_str, **others"])
def test_every_form_of_a_function_is_taken(parameters: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"def mine({parameters}):\n    return 1.0\n")
    build_reward(f"{tmp_path / 'mine.py'}:mine")
