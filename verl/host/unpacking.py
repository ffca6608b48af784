"""Unpacks a tar file of another party, in a process without rights. Started by `untrusted_files.py`, standalone.

    python -I -S unpacking.py SETTINGS    standard input: the tar file

Before it reads a byte of the archive, root becomes the user of untrusted code in a root folder of its own. Nothing is
extracted by `tarfile`, which only parses: files and folders are made relative to open folders, never through a link.
So no entry leads outside, whatever the interpreter's patch level. Prints JSON: what was made, or the problem.
"""

import bz2  # noqa: F401  tarfile imports these later, when no file system is in sight
import encodings.ascii
import encodings.latin_1  # noqa: F401
import errno
import gzip  # noqa: F401
import json
import lzma
import os
import resource
import stat
import sys
import tarfile
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

MIB = 1 << 20
MEMORY_MIB = 1024
LINKS = 40  # on the way to a file, as in the kernel
# Not tried in turn, as tarfile does: zeros without end are padding to xz.
COMPRESSED = {b"\x1f\x8b": "r:gz", b"BZh": "r:bz2", b"\xfd7zXZ\0": "r:xz"}
CHUNK = 1 << 20
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
Parts = tuple[str, ...]


class Refused(Exception):  # noqa: N818  an answer
    """An entry that is not unpacked, and ends the unpacking: (path, problem)."""


class LeadsOutError(ValueError):
    """A link that leads out of its tree."""


def resolve(folder: Parts, path: str, link_at: Callable[[Parts], str | None]) -> Parts:
    """Where a path from a folder of a tree ends, by the links on its way. Raises LeadsOutError; OSError for a loop.

    link_at: the text of the link at a place of the tree; None for none
    """
    here, left, hops = list(folder), deque(path.split("/")), 0
    if path.startswith("/"):
        raise LeadsOutError("is a link that leads out")
    while left:
        part = left.popleft()
        if part in ("", "."):
            continue
        if part == "..":
            if not here:
                raise LeadsOutError("is a link that leads out")
            here.pop()
        elif (text := link_at((*here, part))) is None:
            here.append(part)
        else:
            hops += 1
            if hops > LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            if text.startswith("/"):
                raise LeadsOutError("is a link that leads out")
            left.extendleft(reversed(text.split("/")))
    return tuple(here)


def leads_out(link: Parts, text: str, links: Mapping[Parts, str]) -> bool:
    """Whether the link at this path in a tree leads out of it. A loop, which has no end, does not."""
    try:
        resolve(link[:-1], text, links.get)
    except LeadsOutError:
        return True
    except OSError:
        return False
    return False


@contextmanager
def folder_below(top: int, parts: Sequence[str], make: bool = False) -> Iterator[int]:
    """The descriptor of a folder below an open one; no link on its way is followed. Raises OSError.

    make: folders that are not there
    """
    here = os.dup(top)
    try:
        for part in parts:
            if make:
                _make_folder(part, here)
            inner = os.open(part, FOLDER, dir_fd=here)
            os.close(here)
            here = inner
        yield here
    finally:
        os.close(here)


class Unpacking:
    """top: the target's descriptor; links: as `untrusted_files.unpack` describes"""

    def __init__(self, top: int, mib: float, files: int, depth: int, links: str) -> None:
        self._top, self._room, self._most_files, self._depth, self._policy = top, int(mib * MIB), files, depth, links
        self._links: dict[Parts, str] = {}
        self.bytes = self.files = 0

    def run(self, archive: IO[bytes]) -> None:
        first = archive.read(max(map(len, COMPRESSED)))
        archive.seek(0)
        mode: Any = next((mode for magic, mode in COMPRESSED.items() if first.startswith(magic)), "r:")
        with tarfile.open(fileobj=archive, mode=mode) as tar:
            while (member := tar.next()) is not None:
                vars(tar)["members"].clear()  # which would hold all
                parts = tuple(part for part in member.name.split("/") if part not in ("", "."))
                try:
                    self._add(tar, member, parts)
                except (OSError, ValueError) as error:
                    if isinstance(error, OSError) and error.errno in FULL:
                        raise
                    raise Refused(member.name, getattr(error, "strerror", None) or str(error)) from error
            assert tar.fileobj is not None
            tar.fileobj.seek(tar.offset)
            if tar.fileobj.read(tarfile.BLOCKSIZE).strip(b"\0"):  # tarfile takes a damaged header for the end
                raise tarfile.ReadError("damaged")
        if not self.files:
            raise tarfile.ReadError("it holds nothing")
        for link, text in self._links.items():
            if self._policy == "inside" and leads_out(link, text, self._links):
                raise Refused("/".join(link), "is a link that leads out of the archive")

    def _add(self, tar: tarfile.TarFile, member: tarfile.TarInfo, parts: Parts) -> None:
        if member.name.startswith("/") or ".." in parts:
            raise ValueError("leads out of the archive")
        if len(parts) > self._depth:
            raise ValueError(f"lies deeper than {self._depth} folders")
        self.files += 1
        if self.files > self._most_files:
            raise ValueError(f"is one of more than {self._most_files} entries")
        if not parts:
            if not member.isdir():
                raise ValueError("has no name")
            return
        with folder_below(self._top, parts[:-1], make=True) as folder:
            if member.isdir():
                _make_folder(parts[-1], folder, member.mode & 0o755 | 0o700)
            elif member.isreg():
                self._write(tar, member, parts[-1], folder)
            elif member.issym() and self._policy != "none":
                _make_way(parts[-1], folder)
                os.symlink(member.linkname, parts[-1], dir_fd=folder)
                self._links[parts] = member.linkname
            elif member.islnk() and self._policy != "none":
                self._link(member, parts[-1], folder)
            else:
                raise ValueError("is neither a file nor a folder")
        if not member.issym():
            self._links.pop(parts, None)

    def _write(self, tar: tarfile.TarFile, member: tarfile.TarInfo, name: str, folder: int) -> None:
        self.bytes += member.size
        if self.bytes > self._room:
            raise ValueError(f"is too large: the archive holds more than {self._room / MIB:g} MiB")
        source = tar.extractfile(member)
        assert source is not None
        _make_way(name, folder)
        with os.fdopen(os.open(name, NEW_FILE, 0o600, dir_fd=folder), "wb") as file:
            left = member.size
            while left:
                data = source.read(min(left, CHUNK))
                if not data:
                    raise ValueError("is cut off")
                file.write(data)
                left -= len(data)
            file.flush()
            os.fchmod(file.fileno(), member.mode & 0o755 | 0o600)
            with suppress(ValueError, OverflowError, OSError):  # a time that no file can have
                os.utime(file.fileno(), (member.mtime, member.mtime))

    def _link(self, member: tarfile.TarInfo, name: str, folder: int) -> None:
        """A second name of a file that was unpacked before."""
        *above, last = (part for part in member.linkname.split("/") if part not in ("", "."))
        if member.linkname.startswith("/") or ".." in (*above, last):
            raise ValueError("is a hard link that leads out of the archive")
        with folder_below(self._top, above) as other:
            if not is_file(last, other):
                raise ValueError("is a hard link to no file")
            _make_way(name, folder)
            os.link(last, name, src_dir_fd=other, dst_dir_fd=folder, follow_symlinks=False)


def is_file(name: str, folder: int) -> bool:
    return stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)


def _make_folder(name: str, above: int, mode: int | None = None) -> None:
    with suppress(FileExistsError):
        os.mkdir(name, 0o755, dir_fd=above)
    if mode is not None:
        folder = os.open(name, FOLDER, dir_fd=above)
        try:
            os.fchmod(folder, mode)
        finally:
            os.close(folder)


def _make_way(name: str, folder: int) -> None:
    """A later entry of a name replaces an earlier one, which is no folder."""
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def become(user: int, target: int) -> None:
    """Give up all rights of root, with the target as the root folder. Raises OSError."""
    os.fchdir(target)
    with suppress(PermissionError):  # in some containers; then links are not followed either
        os.chroot(".")
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def main(target: int, user: int | None, seconds: float, **limits: Any) -> dict[str, Any]:
    """What was made, or the problem. user: whom root becomes"""
    size = int((limits["mib"] + 1) * MIB)
    bounds = {resource.RLIMIT_AS: MEMORY_MIB * MIB, resource.RLIMIT_CPU: int(seconds) + 1, resource.RLIMIT_FSIZE: size}
    for kind, most in {**bounds, resource.RLIMIT_CORE: 0}.items():
        resource.setrlimit(kind, (most, most))
    os.umask(0o022)
    try:
        if user is not None:
            become(user, target)
        work = Unpacking(target, **limits)
        with os.fdopen(0, "rb") as archive:
            work.run(archive)
        return {"bytes": work.bytes, "files": work.files}
    except Refused as error:
        return {"path": error.args[0][:1000], "problem": error.args[1]}
    except OSError as error:
        return {"errno": error.errno, "problem": error.strerror or str(error)}
    except (tarfile.TarError, EOFError, ValueError, RecursionError, zlib.error, lzma.LZMAError) as error:
        return {"path": "", "problem": f"is no whole tar file ({str(error)[:200]})"}
    except MemoryError:
        return {"path": "", "problem": f"needs more than {MEMORY_MIB} MiB of memory"}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(**json.loads(sys.argv[1]))))
