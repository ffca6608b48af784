"""Errors carry their place across processes; names resolve or name what was meant."""

from __future__ import annotations

import pickle
from argparse import ArgumentTypeError
from collections.abc import Sequence
from typing import Any, Literal

import pytest

from verl.errors import ConfigError, DataError, ServiceDownError, VerlError
from verl.registry import check_options, nearest, option, resolve


def test_a_data_error_has_problem_place_expectation_and_hint() -> None:
    error = DataError("is empty", "a text", "Drop the row").at(file="a.parquet", row=3).at(row=9, field="prompt")
    assert str(error) == "a.parquet, row 3, field 'prompt': is empty; expected a text. Drop the row"
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, VerlError) and str(copy) == str(error) and copy.row == 3
    down = pickle.loads(pickle.dumps(ServiceDownError("search", "is gone", tool="find")))
    assert (str(down), down.tool) == ("search: is gone", "find")


def test_names_are_resolved_lazily_from_the_table_or_as_spelled() -> None:
    table = {"sqrt": "math:sqrt", "broken": "no_such_module:x"}
    assert resolve("thing", "sqrt", table)(9) == resolve("thing", "math:sqrt", {})(9) == 3.0
    with pytest.raises(ConfigError, match="unknown thing 'sqr'; did you mean 'sqrt'"):
        resolve("thing", "sqr", table)
    with pytest.raises(ConfigError, match="cannot import module 'no_such_module'"):
        resolve("thing", "broken", table)
    assert nearest("zzz", ["b", "a"]) == "known: a, b"


def made(first: int, *, shared: str, ratio: float = 1.0, name: str | None = None, flag: bool = False) -> None: ...
def needing(count: int, names: Sequence[str] | None = None, *, kind: Literal["a", "b"] = "a") -> None: ...


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flags": True}, r"has no option 'flags'; did you mean 'flag'\?"),
        ({"shared": "y"}, r"has no option 'shared'; its options are ratio, name, flag"),
        ({"ratio": "2"}, r"option 'ratio' must be of type float, not '2'"),
        ({"ratio": True}, "must be of type float"),
        ({"flag": 1}, "must be of type bool"),
        ({"name": 3}, "option 'name' must be of type str or None, not 3"),
    ],
)
def test_options_are_checked_before_anything_is_made(options: dict[str, Any], message: str) -> None:
    check_options("thing", "made", made, {"ratio": 2, "name": None}, 1, shared="x")
    with pytest.raises(ConfigError, match=message):
        check_options("thing", "made", made, options, 1, shared="x")
    with pytest.raises(ConfigError, match=r"missing a required.*'first'; its options are first, ratio"):
        check_options("thing", "made", made, {}, shared="x")


def test_options_without_a_default_are_checked_by_their_annotations() -> None:
    for names in (["x"], None):
        check_options("thing", "needing", needing, {"count": 2, "names": names, "kind": "b"})
    with pytest.raises(ConfigError, match="option 'count' must be of type int, not 'two'"):
        check_options("thing", "needing", needing, {"count": "two"})
    with pytest.raises(ConfigError, match="option 'kind' must be of type str, not 1"):
        check_options("thing", "needing", needing, {"count": 2, "kind": 1})


def test_values_of_options_on_the_command_line() -> None:
    assert [option(f"k={text}")[1] for text in ("3", "[1]", "null", "x y", "")] == [3, [1], None, "x y", ""]
    for text, message in (('{"a": 1, "a": 2}', "has the key 'a' twice"), ("1e400", "is not a number")):
        with pytest.raises(ArgumentTypeError, match=message):
            option(f"k={text}")
