"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl.errors import DataError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` to write to; renamed to `path` at the end, removed if anything fails.

    Raises DataError when the disk is full or the folder cannot be written to.
    """
    unfinished = path.with_name(f".{path.name}.unfinished-{os.getpid()}")
    try:
        yield unfinished
        unfinished.replace(path)
    except OSError as error:
        raise DataError(
            f"cannot be written ({error})", mend="Free some space or choose another folder", file=str(path)
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)
