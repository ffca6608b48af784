"""Files that another party wrote or may still write: results of programs, archives, folders of models and repositories.

What lies at such a path is unknown: a link to a file of this machine, a pipe that never answers, a file without end, a
folder in a folder in a folder. Therefore every component of a path is opened relative to its folder, without following
links (O_NOFOLLOW) or waiting (O_NONBLOCK); only regular files are read, within limits. A refusal is one DataError with
the path and the reason. Nothing here belongs on an event loop: call it by `asyncio.to_thread`.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Literal

from verl.errors import DataError
from verl.host import unpacking
from verl.host.unpacking import FOLDER, MIB, Parts, folder_below, resolve
from verl.host.watcher import remove_tree

Links = Literal["inside", "kept", "none"]
UNPRIVILEGED_UID = 65534  # the user of untrusted code if root starts it
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_TEXTS, _MOST_TEXT = (".json", ".txt", ".jinja", ".model"), 1 << 30  # files of a model
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_TEMPLATES = "additional_chat_templates"
_SHOWN = 300  # characters of a path in a message
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of what is unpacked or copied."""

    mib: float = 16_384
    files: int = 1_000_000
    depth: int = 200
    seconds: float = 600.0


DEFAULT = Limits()
MODEL = Limits(mib=8 << 20, files=100_000, depth=20, seconds=12 * 3600)


def read(folder: Path, name: str, most: int, *, shared: bool = False) -> bytes:
    """The content of the file `name` below a folder. Raises FileNotFoundError, and DataError beyond `most` bytes.

    shared: of a folder that is prepared and handed on: links within it and second names are accepted
    """
    with opened(folder, name, shared=shared) as file:
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
def opened(folder: Path, name: str, *, shared: bool = False) -> Iterator[BinaryIO]:
    """A regular file below a folder, whose own path is ours. Raises FileNotFoundError, DataError. shared: see `read`"""
    top, prefix = _tree_of(folder) if shared else (folder, ())
    with ExitStack() as stack:
        try:
            parts = (*prefix, *_parts(name))
            root = stack.enter_context(_folder(top))
            if shared:
                file = stack.enter_context(_resolved(root, parts))
            else:
                file = stack.enter_context(_opened(root, parts))
                if os.fstat(file.fileno()).st_nlink > 1:
                    raise ValueError("has several names (hard links)")
        except FileNotFoundError:
            raise
        except (OSError, ValueError) as error:  # ValueError: also for no name, and for a NUL in one
            raise _refused(error, f"{folder}/{name}") from error
        yield file


def copy_tree(
    source: Path, target: Path, limits: Limits = DEFAULT, *, followed: bool, without: Collection[str] = ()
) -> None:
    """Copy what is in a folder into another, which is made if it is not there. without: names that are left out

    followed: a link to a file in the folder becomes a copy, and others are refused; else links are copied as text.
    Raises DataError with the path and the reason, and OSError if the target cannot be written.
    """
    top, prefix = _tree_of(source) if followed else (source, ())
    target.mkdir(parents=True, exist_ok=True)
    until, room = time.monotonic() + limits.seconds, limits.mib * MIB
    with _refusing(source), _folder(top) as root:
        for parts, here, found in _entries(root, prefix, limits, without):
            new, path = target.joinpath(*parts[len(prefix) :]), top.joinpath(*parts)
            if stat.S_ISDIR(found.st_mode):
                new.mkdir(exist_ok=True)
            elif stat.S_ISLNK(found.st_mode) and not followed:
                with _refusing(path):
                    text = os.readlink(parts[-1], dir_fd=here)
                new.symlink_to(text)
            else:
                with _refusing(path):
                    file = _resolved(root, parts)
                with file:
                    room -= os.fstat(file.fileno()).st_size
                    if room < 0 or time.monotonic() > until:
                        reason = f"more than {limits.mib:g} MiB, or more than {limits.seconds:g} s"
                        raise DataError(f"cannot be copied: it takes {reason}", file=shown(path))
                    _copy(file, new, path, until)


def copy_file(source: Path, target: Path) -> None:
    """Copy one file of a folder that is handed on. Raises FileNotFoundError, DataError, and OSError of writing."""
    with opened(source.parent, source.name, shared=True) as file:
        _copy(file, target, source, time.monotonic() + DEFAULT.seconds)


def copy_texts(model: Path, target: Path) -> None:
    """Copy what a library reads of a model's folder besides its weights. Raises DataError, and OSError of writing.

    Between a check and the library's own reading a file may become a device without end.
    """
    for part in ("", _TEMPLATES):
        folder = model / part
        if not folder.is_dir():
            continue
        (target / part).mkdir(exist_ok=True)
        for each in sorted(folder.iterdir()):
            if each.name.endswith(_WEIGHTS) or not each.is_file():  # nor the folders below it; refusals: `check_files`
                continue
            with suppress(FileNotFoundError):
                copy_file(each, target / part / each.name)


def check_files(folder: Path) -> None:
    """Checks a folder that a library reads. Raises DataError for a pipe, device, link that leads out, or giant text."""
    top, prefix = _tree_of(folder)
    with _refusing(folder), _folder(top) as root, _folder(root, prefix) as here:
        for name in sorted(os.listdir(here)):  # noqa: PTH208  a descriptor
            with _refusing(folder / name), suppress(FileNotFoundError):  # a link to nothing is no file for the library
                place = resolve((), "/".join((*prefix, name)), lambda at: _link_at(root, at))
                found = os.stat("/".join(place) or ".", dir_fd=root, follow_symlinks=False)
                if not stat.S_ISDIR(found.st_mode):
                    _check_kind(found)
                    if name.endswith(_TEXTS) and found.st_size > _MOST_TEXT:
                        raise ValueError(f"is too large for a text: more than {_MOST_TEXT >> 20} MiB")


def remove(folder: Path, name: str) -> None:
    """What is at a path below a folder, if anything; no link on its way is followed. Raises DataError."""
    with _refusing(Path(folder, name)):
        *above, last = _parts(name)
        try:
            with _folder(folder) as root, _folder(root, above) as here:
                remove_tree(f"/proc/self/fd/{here}/{last}")
        except FileNotFoundError:
            return


def unpack(
    archive: BinaryIO, target: Path, limits: Limits = DEFAULT, links: Links = "inside", *, mine: bool = True
) -> int:
    """Unpack a tar file into a new folder, in a process without rights (unpacking.py); returns the bytes of its files.

    links: `inside`: none may lead out of the archive; `kept`: as text, which no process here follows; `none`: files and
    folders alone. mine: the folder belongs to this user in the end; else, if that is root, to the user of untrusted
    code. Raises DataError with the entry and the reason, and OSError if the target cannot be written; then parts may
    be there.
    """
    user = UNPRIVILEGED_UID if os.geteuid() == 0 else None
    target.mkdir(mode=0o755)
    with _folder(target) as folder:
        if user is not None:
            os.fchown(folder, user, user)
        given = {**asdict(limits), "links": links, "user": user, "target": folder}
        command = [sys.executable, "-I", "-S", "-X", "utf8", unpacking.__file__, json.dumps(given)]
        archive.seek(0)
        pipe = subprocess.PIPE
        try:
            done = subprocess.run(
                command,
                stdin=archive,
                stdout=pipe,
                stderr=pipe,
                pass_fds=[folder],
                env={},
                cwd="/",
                timeout=limits.seconds,
            )
        except subprocess.TimeoutExpired as error:
            raise DataError(f"is not unpacked within {limits.seconds:g} s", "a tar file") from error
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
    """Make a user the owner of a tree that we made and no other process can reach. Does nothing if this is not root."""
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


def shown(path: str | Path) -> str:
    """A path in a message: printable, and not too long."""
    text = os.fsencode(path).decode(errors="backslashreplace")
    text = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]}..{text[-_SHOWN // 2 :]}"


def _entries(
    root: int, prefix: Parts, limits: Limits, without: Collection[str]
) -> Iterator[tuple[Parts, int, os.stat_result]]:
    """(path, descriptor of its folder, what it is) of all below a folder, folders before what is in them.

    Raises DataError beyond the limits, and OSError.
    """
    waiting, count = [prefix], 0
    while waiting:
        place = waiting.pop()
        with _folder(root, place) as here:
            for name in sorted(set(os.listdir(here)).difference(without)):  # noqa: PTH208  a descriptor
                try:
                    found = os.stat(name, dir_fd=here, follow_symlinks=False)
                except FileNotFoundError:  # gone meanwhile
                    continue
                count += 1
                if stat.S_ISDIR(found.st_mode):
                    waiting.append((*place, name))
                if count > limits.files or len(place) - len(prefix) > limits.depth:
                    problem = f"holds more than {limits.files} files, or nests more than {limits.depth} folders"
                    raise DataError(problem, file=shown("/".join(place)))
                yield (*place, name), here, found


def _copy(file: BinaryIO, new: Path, source: Path, until: float) -> None:
    """Raises DataError for a file that changes meanwhile, or has no room; OSError of writing."""
    found = os.fstat(file.fileno())
    if found.st_size > shutil.disk_usage(new.parent).free:
        problem = f"has {found.st_size} bytes, for which {new.parent} has no room"
        raise DataError(problem, hint="Free some space", file=shown(source))
    left = found.st_size
    with new.open("wb") as copy:
        while left and time.monotonic() < until and (data := file.read(min(left, MIB))):
            copy.write(data)
            left -= len(data)
        os.fchmod(copy.fileno(), found.st_mode & 0o755 | 0o600)
    after = os.fstat(file.fileno())
    if left or (after.st_size, after.st_mtime_ns) != (found.st_size, found.st_mtime_ns):
        raise DataError("changed while it was copied, or took too long", file=shown(source))
    os.utime(new, ns=(found.st_atime_ns, found.st_mtime_ns))


def _tree_of(folder: Path) -> tuple[Path, Parts]:
    """(the folder in which links may lead, the way from there): a snapshot of the hub's cache links to its blobs."""
    whole = folder.absolute()
    above = whole.parents
    if len(above) > 1 and above[0].name == "snapshots" and above[1].name.startswith(("models--", "datasets--")):
        return above[1], ("snapshots", whole.name)
    return folder, ()


@contextmanager
def _folder(above: int | Path, parts: Sequence[str] = ()) -> Iterator[int]:
    """The descriptor of a folder; below `above` no link is followed. Raises OSError."""
    top = os.dup(above) if isinstance(above, int) else os.open(above, FOLDER & ~os.O_NOFOLLOW)
    try:
        with folder_below(top, parts) as here:
            yield here
    finally:
        os.close(top)


def _opened(root: int, parts: Parts) -> BinaryIO:
    """Raises OSError, and ValueError for all but a regular file."""
    if not parts:
        raise ValueError("is a folder")
    with _folder(root, parts[:-1]) as here:
        _check_kind(os.stat(parts[-1], dir_fd=here, follow_symlinks=False))  # opening a device may change it
        file = os.fdopen(os.open(parts[-1], FILE, dir_fd=here), "rb")
    try:
        _check_kind(os.fstat(file.fileno()))
    except ValueError:
        file.close()
        raise
    return file


def _resolved(root: int, parts: Parts) -> BinaryIO:
    """As `_opened`, with links that stay below `root`, and second names of files of the folder's owner."""
    place = resolve((), "/".join(parts), lambda at: _link_at(root, at))
    file = _opened(root, place)
    found, folder = os.fstat(file.fileno()), "/".join(place[:-1]) or "."
    if found.st_nlink > 1 and found.st_uid != os.stat(folder, dir_fd=root, follow_symlinks=False).st_uid:
        file.close()
        raise ValueError("has several names, and another owner than its folder (hard links)")
    return file


def _link_at(root: int, place: Parts) -> str | None:
    """The text of a link on a way that has been resolved; None for what is none."""
    try:
        return os.readlink("/".join(place), dir_fd=root)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT, errno.ENOTDIR):
            return None
        raise


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """OSError and ValueError of reading as DataError with the path."""
    try:
        yield
    except DataError:
        raise
    except ValueError as error:
        raise _refused(error, str(path)) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG):  # errors of writing
            raise
        raise _refused(error, str(path)) from error


def _refused(error: Exception, path: str) -> DataError:
    problem = f"cannot be read ({error.strerror or error})" if isinstance(error, OSError) else str(error)
    return DataError(problem, "a regular file", file=shown(path))


def _parts(name: str) -> Parts:
    """Raises ValueError for a path that is not below its folder."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts:
        raise ValueError("is no path below its folder")
    return parts


def _check_kind(found: os.stat_result) -> None:
    """Raises ValueError for all but a regular file."""
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"is {_KINDS.get(stat.S_IFMT(found.st_mode), 'of no known kind')}")
