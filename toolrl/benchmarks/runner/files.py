"""Benchmark data: files under one folder, or a data set loaded by its hub name (toolrl/benchmarks/runner/hub.py)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from toolrl.benchmarks.runner.benchmark import BenchmarkContext
from toolrl.benchmarks.runner.hub import HubSet
from verl.data.rows import read_rows
from verl.errors import ConfigError, DataError

Fields = Mapping[str, type | tuple[type, ...]]
Numbered = tuple[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class RowSet:
    """Published rows. files: their possible names; hub: the published data set, if any"""

    files: tuple[str, ...]
    source: str
    hub: HubSet | None


def find_file(data_dir: Path, names: Sequence[str], hint: str) -> Path:
    """The first of `names` in the folder or at most two levels below it. Raises ConfigError with the hint."""
    for name in names:
        matches = sorted(chain(*(data_dir.glob(f"{depth}{name}") for depth in ("", "*/", "*/*/"))))
        if matches:
            return matches[0]
    raise ConfigError(f"{' or '.join(names)} is not in {str(data_dir)!r} (eval.data_dir) or below it; {hint}")


def rows_of(context: BenchmarkContext, rows: RowSet, prefix: str, fields: Fields) -> Iterator[Numbered]:
    """Rows of a file as in `numbered_rows`, else of the data set, with ids from `prefix`. Raises ConfigError."""
    hub = rows.hub
    try:
        path = find_file(context.data_dir, rows.files, f"it is {rows.source}, as rows of {{{', '.join(fields)}}}")
    except ConfigError as missing:
        if hub is None:
            raise
        try:
            loaded = hub.load(context.data_dir)
        except ConfigError as error:
            raise ConfigError(f"{error}, and {missing}") from error
        yield from _check(hub.rows(loaded, prefix), fields, hub.name, hub.name)
    else:
        yield from numbered_rows(path, fields)


def numbered_rows(path: Path, fields: Fields) -> Iterator[Numbered]:
    """(file#number, row), types checked. Raises DataError that names file and row, also for an empty file."""
    yield from _check(read_rows(str(path)), fields, str(path), path.name)


def _check(rows: Iterable[Any], fields: Fields, source: str, name: str) -> Iterator[Numbered]:
    number = -1
    for number, row in enumerate(rows):
        if isinstance(row, DataError):
            raise row.at(file=source, row=number)
        if not isinstance(row, Mapping):
            raise DataError(f"is of type {type(row).__name__}", "an object", file=source, row=number)
        for field, kind in fields.items():
            if not isinstance(row.get(field), kind):
                got = f"is of type {type(row[field]).__name__}" if field in row else "is missing"
                expected = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
                raise DataError(got, f"a value of type {expected}", file=source, row=number, field=field)
        yield f"{name}#{number}", dict(row)
    if number < 0:
        raise DataError("has no rows", "at least one", "Write or copy it again", source)


def answer_texts(answer: Any, place: str, field: str) -> list[str]:
    """A row's gold answer or answers as a list. Raises DataError for other types than strings, and empty ones."""
    texts = [answer] if isinstance(answer, str) else answer
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise DataError(f"is {answer!r:.80}", "one or more nonempty strings", file=place, field=field)
    return list(texts)
