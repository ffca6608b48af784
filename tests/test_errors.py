"""Errors carry their place across processes; names resolve or say what was meant."""

from __future__ import annotations

import pickle

import pytest

from verl.errors import ConfigError, DataError, ServiceDownError, VerlError
from verl.registry import nearest, resolve


def test_data_error_says_what_where_what_was_expected_and_the_mend() -> None:
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
