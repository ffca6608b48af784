"""What the ends of a data file show without a parser: that it is empty, or not of its format."""

from __future__ import annotations

from pathlib import Path

from verl.errors import DataError

DATA_SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".json", ".csv")
_HINT = "Write or copy it again"
_PARQUET, _GZIP = b"PAR1", b"\x1f\x8b"
_FOOTER = 12  # bytes of a parquet file behind its metadata, their length among them, and of the mark at its start


def check_ends(source: str) -> None:
    """Raises DataError for a data file that cannot be read whatever its middle holds."""
    path = Path(source)
    size = path.stat().st_size
    if size == 0:
        raise DataError("is empty: it has 0 bytes", hint=_HINT, file=source)
    with path.open("rb") as file:
        start = file.read(4)
        if path.suffix == ".parquet":
            file.seek(max(0, size - 8))
            length, mark = file.read(4), file.read(4)
            complete = start == mark == _PARQUET and int.from_bytes(length, "little") + _FOOTER <= size
            if not complete:
                problem = "cannot be read as parquet (it was cut off, or is a file of another format)"
                raise DataError(problem, hint=_HINT, file=source)
        if path.suffix == ".gz" and not start.startswith(_GZIP):
            raise DataError("cannot be read as gzip", hint=_HINT, file=source)
