"""Lines of results.jsonl, read back. Importing this needs nothing but Python."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.gpu.measurements import FAILED, OK, SKIPPED, Row
from verl.errors import DataError

_NUMBER, _NOTHING = (int, float), type(None)
_FIELDS: Mapping[str, tuple[type, ...]] = {
    "name": (str,),
    "state": (str,),
    "reason": (str, _NOTHING),
    "figures": (dict,),
    "seconds": _NUMBER,
    "versions": (dict,),
    "device": (str,),
    "rehearsal": (bool,),
}
_FIGURE = (*_NUMBER, str, _NOTHING)
_HINT = "Remove that line, or give a results.jsonl that came back"


def read_rows(path: Path) -> list[Row]:
    """Raises DataError for what is no file of results, with the first bad line."""
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"holds no results ({error})", hint=_HINT, file=str(path)) from error
    return [_row(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line or number > 1]


def _row(line: str, place: str) -> Row:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise DataError(f"is no result: not JSON ({error})", hint=_HINT, file=place) from error
    if wrong := _wrong(found):
        raise DataError(f"is no result: {wrong}", hint=_HINT, file=place)
    row: Row = found
    return row


def _wrong(found: Any) -> str | None:
    if not isinstance(found, dict):
        return "not an object"
    for name, kinds in _FIELDS.items():
        if not isinstance(found.get(name, ...), kinds):
            return f"{name!r} is {found[name]!r}" if name in found else f"no {name!r}"
    if found["state"] not in (OK, FAILED, SKIPPED):
        return f"'state' is {found['state']!r}, not {OK}, {FAILED} or {SKIPPED}"
    figures = (f"figure {name!r}" for name, value in found["figures"].items() if not isinstance(value, _FIGURE))
    return next((f"{each} is neither a number nor a text" for each in figures), None)
