"""JSON values: what the strict reader refuses, with its path, and what Python's types become."""

from __future__ import annotations

import json
from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from verl.json_values import JsonError, as_json_value, check_values, read_json
from verl.text import as_text

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(VALUES)
def test_json_is_read_as_by_pythons_reader(value: Any) -> None:
    assert read_json(json.dumps(value)) == value == as_json_value(value)


@pytest.mark.parametrize(
    ("text", "path", "problem"),
    [
        ('{"a": 1, "a": 1}', "", "has the key 'a' twice"),
        ('{"a": {"b": [0, {"c": 1, "d": 2, "c": 3}]}}', "a.b[1]", "has the key 'c' twice"),
        ('{"a": 1, "\\u0061": 2}', "", "has the key 'a' twice"),
        ("NaN", "", "is not valid JSON: NaN is not a number"),
        ('[1, {"x": -Infinity}]', "[1].x", "is not valid JSON: -Infinity is not a number"),
        ("[1e400]", "[0]", "is not valid JSON: 1e400 is not a number"),
        ('{"x": -1.5E+999}', "x", "is not valid JSON: -1.5E+999 is not a number"),
    ],
)
def test_text_that_programs_read_differently_is_refused(text: str, path: str, problem: str) -> None:
    json.loads(text)
    with pytest.raises(JsonError) as caught:
        read_json(text)
    assert (caught.value.path, caught.value.problem) == (path, problem)
    assert caught.value.in_data("messages[0]").field == "messages[0]" + (f".{path}" if path[:1].isalpha() else path)


def test_small_and_large_numbers_that_fit_are_read() -> None:
    assert read_json("[1e308, 1e-400, -0.0, 123456789012345678901234567890]") == [
        1e308,
        0.0,
        0.0,
        123456789012345678901234567890,
    ]


@pytest.mark.parametrize("value", [float("nan"), [1, {"a": float("inf")}], {"b": (1.0, float("-inf"))}])
def test_numbers_in_python_values_are_checked(value: Any) -> None:
    with pytest.raises(JsonError, match="is not a number"):
        check_values(value)


class Color(Enum):
    RED = "red"
    AT = datetime(2026, 1, 2)


class Level(IntEnum):
    HIGH = 3


class Mode(StrEnum):
    FAST = "fast"


@dataclass
class Point:
    x: float
    when: date


class Weather(BaseModel):
    city: str
    at: datetime
    color: Color


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("as it is", "as it is"),
        (datetime(2026, 1, 2, 3, 4, tzinfo=UTC), '"2026-01-02T03:04:00+00:00"'),
        ({"on": date(2026, 1, 2), "at": time(3, 4)}, '{"on": "2026-01-02", "at": "03:04:00"}'),
        ([Decimal("1.10"), UUID(int=1)], '["1.10", "00000000-0000-0000-0000-000000000001"]'),
        ([Fraction(1, 3), deque([1, 2], maxlen=2)], '["1/3", [1, 2]]'),
        (np.datetime64("2026-01-02T03:04:05", "ns"), '"2026-01-02T03:04:05.000000000"'),
        (np.array(["2026-01-02", "2026-01-03"], "datetime64[D]"), '["2026-01-02", "2026-01-03"]'),
        ({"at": [np.datetime64("2026-01-02T03", "us")]}, '{"at": ["2026-01-02T03:00:00.000000"]}'),
        (PurePosixPath("/a"), '"/a"'),
        ([Color.RED, Color.AT, Level.HIGH, Mode.FAST], '["red", "2026-01-02T00:00:00", 3, "fast"]'),
        ({Color.RED: 1, Level.HIGH: 2, 7: 3, None: 4, True: 5}, '{"red": 1, "3": 2, "7": 3, "null": 4, "true": 5}'),
        ({"b", "a", "c"}, '["a", "b", "c"]'),
        (frozenset({3, 1}), "[1, 3]"),
        (np.float32(0.5), "0.5"),
        (np.array([[1, 2], [3, 4]]), "[[1, 2], [3, 4]]"),
        ({"n": np.int64(3), "b": np.bool_(True)}, '{"n": 3, "b": true}'),
        (Point(1.5, date(2026, 1, 2)), '{"x": 1.5, "when": "2026-01-02"}'),
        (
            Weather(city="Oslo", at=datetime(2026, 1, 2), color=Color.RED),
            '{"city": "Oslo", "at": "2026-01-02T00:00:00", "color": "red"}',
        ),
        ([Pair(1, 2), OrderedDict(a=(1, None))], '[[1, 2], {"a": [1, null]}]'),
        ({"é": float("nan")}, '{"é": NaN}'),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,  # sets have no fixed order
)
def test_results_of_tools_are_json(result: Any, text: str) -> None:
    assert as_text(result) == text


@pytest.mark.parametrize(
    "result",
    [
        object(),
        [b"x"],
        {"f": print},
        {(1, 2): 3},
        Point,
        1j,
        range(3),
        bytearray(b"x"),
        memoryview(b"x"),
        np.array([1j]),
        np.timedelta64(5, "ns"),
        np.array([5], "timedelta64[ns]"),
        (each for each in "ab"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_without_a_json_form_is_named(result: Any) -> None:
    with pytest.raises(
        TypeError,
        match=r"of type (object|bytes|builtin_function_or_method|list|type|complex|range|bytearray|memoryview|"
        r"timedelta64|ndarray|generator), which has no form in JSON",
    ):
        as_text(result)


@pytest.mark.parametrize(
    "result",
    [
        {1: "a", "1": "b"},
        [{None: 1, "null": 2}],
        {"x": {True: 1, "true": 2}},
        {Color.RED: 1, "red": 2},
        {1.5: 1, "1.5": 2},
    ],
    ids=str,
)
def test_keys_that_are_the_same_text_are_named(result: Any) -> None:
    with pytest.raises(JsonError, match=r"has the key '(1|null|true|red|1\.5)' twice"):
        as_text(result)
