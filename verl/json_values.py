"""JSON values: read strictly, and made of Python's other types.

Refused is what other programs read differently or not at all: a key twice in an object, NaN, an infinity, and a number
too large for a float. This reader is for what users give: rows, arguments, gold answers, results.
"""

import json
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import date, time
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from math import isfinite
from pathlib import PurePath
from typing import Any, NoReturn
from uuid import UUID

from verl.errors import DataError

_Pairs = list[tuple[str, Any]]


class JsonError(ValueError):
    """A JSON value that is refused. problem: a clause; path: its place in the text, e.g. `messages[3].content`"""

    def __init__(self, problem: str, path: str = "") -> None:
        super().__init__(problem, path)
        self.problem, self.path = problem, path

    def __str__(self) -> str:
        return f"{self.path} {self.problem}" if self.path else self.problem

    def in_data(self, field: str = "") -> DataError:
        """The error of a row. field: the one that has the text"""
        dot = "." if field and self.path and not self.path.startswith("[") else ""
        return DataError(self.problem, "keys that differ, and finite numbers", field=f"{field}{dot}{self.path}")


def strict_decoder(
    make_object: Callable[[_Pairs], Any] = dict, report: Callable[[JsonError], Any] | None = None
) -> json.JSONDecoder:
    """A decoder that raises JsonError without a path, or puts what `report` makes of it in place of the value."""
    report = report or _raise

    def unique(pairs: _Pairs) -> Any:
        found = make_object(pairs)
        return found if len(found) == len(pairs) else report(_key_twice(pairs))

    def finite(text: str) -> Any:
        return value if isfinite(value := float(text)) else refuse(text[:20])

    def refuse(text: str) -> Any:
        return report(JsonError(f"is not valid JSON: {text} is not a number"))

    return json.JSONDecoder(object_pairs_hook=unique, parse_float=finite, parse_constant=refuse)


def _raise(error: JsonError) -> NoReturn:
    raise error


def _key_twice(pairs: _Pairs) -> JsonError:
    ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
    return JsonError(f"has the key {twice[:80]!r} twice")


_STRICT = strict_decoder()
_MARKING = strict_decoder(report=lambda error: error)


def read_json(text: str, decoder: json.JSONDecoder = _STRICT) -> Any:
    """The value of a JSON text. Raises JsonError with the path; ValueError or RecursionError for what is not JSON."""
    try:
        return decoder.decode(text)
    except JsonError:
        check_values(_MARKING.decode(text))
        raise


def check_values(value: Any, path: str = "") -> None:
    """Raises JsonError for the first NaN, infinity or value of a strange type in what is not read from JSON."""
    if isinstance(value, JsonError):
        raise JsonError(value.problem, path)
    if isinstance(value, float) and not isfinite(value):
        raise JsonError(f"is not valid JSON: {value} is not a number", path)
    if isinstance(value, Mapping):
        for key, each in value.items():
            check_values(each, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            check_values(each, f"{path}[{number}]")
    elif value is not None and not isinstance(value, str | int | float):
        try:
            as_json_value(value)
        except TypeError as error:
            raise JsonError(f"is {error}", path) from error


def as_json_value(value: Any) -> Any:
    """The value made of texts, numbers, truth values, nulls, lists and objects alone.

    Dates and times become ISO texts; decimals, fractions, UUIDs and paths texts; enums their values; sets sorted lists;
    data classes and pydantic models objects; arrays and deques lists. Raises TypeError, naming the type, for others;
    JsonError if two keys of an object are the same text, as 1 and "1".
    """
    match value:
        case Enum():
            return as_json_value(value.value)
        case None | str() | int() | float():
            return value
        case Mapping():
            pairs = [(_as_key(key), as_json_value(each)) for key, each in value.items()]
            if len(made := dict(pairs)) < len(pairs):
                raise _key_twice(pairs)
            return made
        case list() | tuple() | deque():
            return [as_json_value(each) for each in value]
        case set() | frozenset():
            return sorted(map(as_json_value, value), key=json.dumps)  # the order of a set differs between processes
        case date() | time():
            return value.isoformat()
        case Decimal() | Fraction() | UUID() | PurePath():
            return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_json_value(getattr(value, field.name)) for field in fields(value)}
    kind = getattr(getattr(value, "dtype", None), "kind", None)  # numpy's type code
    if kind == "M":
        return value.astype(str).tolist()  # ISO texts, where tolist alone gives integers for nanoseconds
    is_opaque = isinstance(value, type | memoryview) or kind == "m"  # their tolist gives integers without a unit
    for convert in ("model_dump", "tolist"):  # pydantic; numpy and torch
        if callable(method := getattr(value, convert, None)) and not is_opaque:
            return as_json_value(method())
    raise TypeError(f"of type {type(value).__name__}, which has no form in JSON")


def _as_key(key: Any) -> str:
    key = as_json_value(key)
    if isinstance(key, str):
        return key
    if key is None or isinstance(key, int | float):
        return json.dumps(key)
    raise TypeError(f"an object with a key of type {type(key).__name__}, which has no form in JSON")
