"""Rows of data files: read as a stream, kept on disk, fetched by number.

Nothing here holds a file in memory: 1,000,000 rows cost 8 MB plus one batch.
"""

from __future__ import annotations

import json
import os
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl.errors import DataError

_BATCH_ROWS = 512
_FORMATS = ".parquet, .jsonl or .json (a list of objects)"


def read_rows(source: str) -> Iterator[Any]:
    """The rows of a parquet, jsonl or json file, or of a data set named as `owner/name[:split]`, one after the other.

    Raises DataError for a file that is missing or is not what its name says.
    """
    path = Path(source)
    readers = {".parquet": _read_parquet, ".jsonl": _read_jsonl, ".json": _read_json}
    if path.suffix in readers:
        if not path.is_file():
            raise DataError("there is no such file", _FORMATS, "Check the path", file=source)
        yield from readers[path.suffix](path)
    elif path.exists() or source.count("/") != 1 or source.startswith((".", "/")):
        raise DataError(
            "is neither a data file nor a data set's name", f"{_FORMATS}, or owner/name[:split]", file=source
        )
    else:
        yield from _read_hub(source)


def _read_parquet(path: Path) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"cannot be read as parquet ({error})", mend="Write or copy it anew", file=str(path)) from error


def _read_jsonl(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file):
            if line.strip():
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise DataError(
                        f"is not JSON ({error})", "one object a line", file=str(path), row=number
                    ) from error


def _read_json(path: Path) -> Iterator[Any]:
    import ijson

    with path.open("rb") as file:
        try:
            yield from ijson.items(file, "item", use_float=True)
        except (ijson.JSONError, UnicodeDecodeError) as error:
            raise DataError(f"is not JSON ({error})", "a list of objects", file=str(path)) from error


def _read_hub(source: str) -> Iterator[Any]:
    try:
        import datasets  # not a requirement: only data sets by name need it
    except ImportError as error:
        raise DataError(
            "reads as a data set's name, which needs the package datasets",
            mend="pip install datasets, or give the path of a local file",
            file=source,
        ) from error
    name, _, split = source.partition(":")
    try:
        yield from datasets.load_dataset(name, split=split or "train", streaming=True)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be loaded ({error})", mend="Check the name and the network", file=source) from error


@contextmanager
def _disk_errors(directory: str | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        place = directory or tempfile.gettempdir()
        raise DataError(
            f"cannot keep the rows in {place} ({error})", mend="Free some space or point TMPDIR to a larger disk"
        ) from error


class RowStore:
    """JSON values on disk, in an unnamed temporary file, read back by number.

    Memory: 8 bytes a row. The file vanishes with the store; `directory` chooses its disk (default: TMPDIR).
    """

    def __init__(self, rows: Iterable[Any], directory: str | None = None) -> None:
        """Write all rows out. Raises DataError when the disk has no room for them."""
        self._starts = array("q", [0])
        with _disk_errors(directory):
            self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  lives as long as the store
        for row in rows:
            encoded = json.dumps(row, separators=(",", ":")).encode()
            with _disk_errors(directory):
                self._file.write(encoded)
            self._starts.append(self._starts[-1] + len(encoded))
        with _disk_errors(directory):
            self._file.flush()

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(number)
        start, end = self._starts[number], self._starts[number + 1]
        return json.loads(os.pread(self._file.fileno(), end - start, start))

    def close(self) -> None:
        """Give the disk space back now rather than when the store is collected."""
        self._file.close()
