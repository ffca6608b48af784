"""Where benchmarks find their data: files under one folder, or a data set by its hub name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from verl.data.rows import read_rows
from verl.errors import ConfigError, DataError


def find_file(data_dir: Path, names: Sequence[str], mend: str) -> Path:
    """The first of `names` that lies in the folder or at most two folders below it.

    Raises ConfigError with what was looked for and the mend.
    """
    for name in names:
        found = sorted(chain(*(data_dir.glob(f"{depth}{name}") for depth in ("", "*/", "*/*/"))))
        if found:
            return found[0]
    raise ConfigError(f"{' or '.join(names)} is not in {str(data_dir)!r} (data_dir) or below it; {mend}")


def numbered_rows(path: Path, fields: Mapping[str, type | tuple[type, ...]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file#number, row) for every row, each with `fields` of these types.

    Raises DataError that names file and row, also for a file without any.
    """
    number = -1
    for number, row in enumerate(read_rows(str(path))):
        if isinstance(row, DataError):
            raise row.at(file=str(path), row=number)
        if not isinstance(row, Mapping):
            raise DataError(f"is of type {type(row).__name__}", "an object", file=str(path), row=number)
        for name, kind in fields.items():
            if not isinstance(row.get(name), kind):
                got = f"is of type {type(row[name]).__name__}" if name in row else "is missing"
                expected = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
                raise DataError(got, f"a value of type {expected}", file=str(path), row=number, field=name)
        yield f"{path.name}#{number}", dict(row)
    if number < 0:
        raise DataError("has no row", "at least one", "Write or copy it anew", str(path))


def answer_texts(told: Any, place: str, field: str) -> list[str]:
    """A row's gold answer or answers as a list. Raises DataError for what is no text, and for an empty one."""
    texts = [told] if isinstance(told, str) else told
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise DataError(f"is {told!r:.80}", "a text or several, none of them empty", file=place, field=field)
    return list(texts)
