"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from verl.errors import DataError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` to write to; renamed to `path` at the end, removed if anything fails.

    Makes the folder if need be. Raises DataError when the disk is full or the place cannot be written to.
    """
    if not path.name:
        raise DataError("names no file to write", mend="Give a path that ends in a file name", file=str(path))
    unfinished = path.with_name(f".{path.name}.unfinished-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield unfinished
        unfinished.replace(path)
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def unwritable(path: Path, error: OSError) -> DataError:
    """The error to raise when `path` could not be written because of `error`."""
    mend = "Free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "Name another place"
    return DataError(f"cannot be written ({error.strerror or error})", mend=mend, file=str(path))
