"""Files that another party wrote or may still write: results of programs, archives, folders of models and repositories.

What lies at such a path is unknown: a link to a file of this machine, a pipe that never answers, a file without end, a
folder in a folder in a folder. Therefore every component of a path is opened relative to its folder, without following
links (O_NOFOLLOW) or waiting (O_NONBLOCK); only regular files are read, up to a limit. A refusal is one DataError with
the path. Nothing here belongs on an event loop: call it by `asyncio.to_thread`.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Literal

from verl.errors import DataError
from verl.system import unpacking

Links = Literal["inside", "kept", "none"]
UNPRIVILEGED_UID = 65534  # the user of untrusted code if root starts it

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


@dataclass(frozen=True, slots=True)
class Limits:
    """Of what is unpacked or copied."""

    mib: float = 16_384
    files: int = 1_000_000
    depth: int = 200
    seconds: float = 600.0


DEFAULT = Limits()


def unpack(
    archive: BinaryIO, target: Path, limits: Limits = DEFAULT, links: Links = "inside", *, mine: bool = True
) -> int:
    """Unpack a tar file into a new folder, in a process without rights (unpacking.py); returns the bytes of its files.

    links: `inside`: none may lead out of the archive; `kept`: as text, which nobody here follows; `none`: files and
    folders alone. mine: the folder belongs to this user in the end; else, if that is root, to the user of untrusted
    code. Raises DataError with the entry and the reason, and OSError if the target cannot be written; then parts may
    be there.
    """
    user = UNPRIVILEGED_UID if os.geteuid() == 0 else None
    target.mkdir(mode=0o755)
    folder = os.open(target, FOLDER)
    try:
        if user is not None:
            os.fchown(folder, user, user)
        given = {**asdict(limits), "links": links, "user": user, "target": folder}
        command = [sys.executable, "-I", "-S", "-X", "utf8", unpacking.__file__, json.dumps(given)]
        archive.seek(0)
        pipe = subprocess.PIPE
        done = subprocess.run(
            command, stdin=archive, stdout=pipe, stderr=pipe, pass_fds=[folder], env={}, cwd="/", timeout=limits.seconds
        )
    except subprocess.TimeoutExpired as error:
        raise DataError(f"is not unpacked within {limits.seconds:g} s", "a tar file") from error
    finally:
        os.close(folder)
    if done.returncode:
        how = f"exit code {done.returncode}: {done.stderr.decode(errors='replace').strip()[-_SHOWN:]}"
        raise DataError(f"cannot be unpacked ({how})", "a tar file")
    answer = json.loads(done.stdout)
    if "errno" in answer:
        raise OSError(answer["errno"], answer["problem"], str(target))
    if "problem" in answer:
        raise DataError(answer["problem"], "files, folders and links of one tree", file=shown(answer["path"]))
    if mine and user is not None:
        give(target, os.geteuid())
    return int(answer["bytes"])


def give(tree: Path, user: int) -> None:
    """Make a user the owner of a tree that we made and nobody else can reach. Does nothing if this is not root."""
    if os.geteuid() != 0:
        return
    for _, folders, files, here in os.fwalk(tree):
        os.fchown(here, user, user)
        for name in (*folders, *files):
            os.chown(name, user, user, dir_fd=here, follow_symlinks=False)


def is_folder(path: Path) -> bool:
    """Whether a folder is there, and no link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


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
