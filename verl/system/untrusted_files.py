"""Files that another party wrote or may still write: results of programs, archives, folders of models and repositories.

What lies at such a path is unknown: a link to a file of this machine, a pipe that never answers, a file without end, a
folder in a folder in a folder. Therefore every component of a path is opened relative to its folder, without following
links (O_NOFOLLOW) or waiting (O_NONBLOCK); only regular files are read, up to a limit. A refusal is one DataError with
the path. Nothing here belongs on an event loop: call it by `asyncio.to_thread`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from verl.errors import DataError

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_SHOWN = 300  # characters of a path in a message
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def read(folder: Path, name: str, most: int) -> bytes:
    """The content of the file `name` below a folder. Raises FileNotFoundError, and DataError beyond `most` bytes."""
    with opened(folder, name) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise DataError("is too large", f"at most {most} bytes", file=shown(f"{folder}/{name}"))
    return content


def read_end(folder: Path, name: str, most: int) -> bytes:
    """The last `most` bytes of a file, as `read`."""
    with opened(folder, name) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - most))
        return file.read(most)


@contextmanager
def opened(folder: Path, name: str) -> Iterator[BinaryIO]:
    """A regular file with one name, below a folder of ours. Raises FileNotFoundError, DataError."""
    with ExitStack() as stack:
        try:
            *above, last = _parts(name)
            place = _entered(stack, os.open(folder, FOLDER & ~os.O_NOFOLLOW))
            for each in above:
                place = _entered(stack, os.open(each, FOLDER, dir_fd=place))
            check_kind(os.stat(last, dir_fd=place, follow_symlinks=False))  # opening a device may change it
            file = stack.enter_context(os.fdopen(os.open(last, FILE, dir_fd=place), "rb"))
            found = os.fstat(file.fileno())
            check_kind(found)
            if found.st_nlink > 1:
                raise ValueError("has several names (hard links)")
        except FileNotFoundError:
            raise
        except (OSError, ValueError) as error:  # ValueError: also for no name, and for a NUL in one
            raise refused(error, f"{folder}/{name}") from error
        yield file


def _parts(name: str) -> tuple[str, ...]:
    """Raises ValueError for a path that is not below its folder."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts:
        raise ValueError("is no path below its folder")
    return parts


def _entered(stack: ExitStack, descriptor: int) -> int:
    stack.callback(os.close, descriptor)
    return descriptor


def check_kind(found: os.stat_result) -> None:
    """Raises ValueError for all but a regular file."""
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"is {_KINDS.get(stat.S_IFMT(found.st_mode), 'of no known kind')}")


def refused(error: Exception, path: str) -> DataError:
    problem = f"cannot be read ({error.strerror or error})" if isinstance(error, OSError) else str(error)
    return DataError(problem, "a regular file", file=shown(path))


def shown(path: str) -> str:
    """A path in a message: printable, and not too long."""
    text = os.fsencode(path).decode(errors="backslashreplace")
    text = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]}..{text[-_SHOWN // 2 :]}"
