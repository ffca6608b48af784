"""Atomic file writes."""

import argparse
import errno
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from verl.errors import DataError
from verl.host.watcher import remove_tree

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PROBE_BYTES = 2**20
_SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path that replaces `path` at the end. Creates the folder. Raises DataError."""
    if not path.name:
        raise DataError("is not a file path", hint="Give a path that ends in a file name", file=str(path))
    unfinished = temporary_name(path)
    try:
        yield unfinished
        unfinished.replace(path)
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def temporary_name(path: Path) -> Path:
    """The name under which this process writes a file or folder that becomes `path`. Creates the folder around it.

    Removes what killed processes of this machine have left under such names; other machines may share the folder.
    Raises DataError.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(path, error) from error
    mine = f".{path.name}.unfinished-{socket.gethostname()}-"
    with suppress(OSError):  # a folder that can be written, but not listed
        for left in path.parent.iterdir():
            if left.name.startswith(mine) and _has_ended(left.name.removeprefix(mine)):
                remove_tree(left)
    return path.with_name(f"{mine}{os.getpid()}")


def _has_ended(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except (ValueError, OverflowError, PermissionError):  # no process id, or another user's process
        return False
    return False


def remove_unfinished(folder: Path) -> None:
    """Remove the temporary files that `replacing` has left below the folder in killed processes. Only for the process
    that alone writes there."""
    for path in folder.rglob(".*.unfinished-*"):
        if path.is_file():
            path.unlink(missing_ok=True)


def ending_in(*endings: str) -> Callable[[str], Path]:
    """An argparse type: a path with one of these endings, each of which is a form of file."""

    def path(text: str) -> Path:
        if not text.endswith(endings):
            raise argparse.ArgumentTypeError(f"{text!r} does not end in {' or '.join(endings)}")
        return Path(text)

    return path


def step_files(folder: Path, suffix: str) -> dict[int, Path]:
    """The files `step-000012<suffix>` of a folder, by step. Files of other names, as copies have, are not a run's."""
    found = {}
    for path in folder.glob(f"step-*{suffix}"):
        number = path.name.removeprefix("step-").removesuffix(suffix)
        if number.isdecimal() and f"{int(number):06d}" == number:
            found[int(number)] = path
    return dict(sorted(found.items()))


def unwritable(path: Path, error: OSError) -> DataError:
    if error.errno in FULL:
        return DataError(f"no space left on {path} ({error.strerror})", hint="Free some space")
    return DataError(f"cannot be written ({error.strerror or error})", hint="Choose another path", file=str(path))


def full(folder: Path) -> OSError | None:
    """The error if disk or quota is full (a write is tried), for libraries that hide it."""
    error = _tried(folder)
    return error if error is not None and error.errno in FULL else None


def check_temporary() -> None:
    """Raises DataError if the folder for temporary files is not writable, or shared memory is full."""
    named = Path(os.environ.get("TMPDIR") or tempfile.gettempdir())  # Python would silently skip TMPDIR
    for folder, reason in ((named, _tried(named)), (_SHARED_MEMORY, full(_SHARED_MEMORY))):
        if reason is not None:
            raise unwritable(folder, reason) from reason


def _tried(folder: Path) -> OSError | None:
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(_PROBE_BYTES))
            os.fsync(file.fileno())
    except OSError as error:
        return error
    return None
