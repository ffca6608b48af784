"""Disk usage of a runtime: files and folders below one, and deleted files that its processes have open.

Not counted: deleted files that are only mapped, or whose descriptor waits in a socket.
"""

import contextlib
import glob
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .kernel import MIB

BLOCK = 512  # bytes, of st_blocks
LEAST_MIB, LEAST_FILES = 64, 1000  # free on the disk, for all that use it


class DiskUsage(NamedTuple):
    mib: float  # in blocks; hard links count once
    files: int  # names of files, folders and links


def has_room(folder: Path) -> bool:
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize >= LEAST_MIB * MIB and (space.f_files == 0 or space.f_favail >= LEAST_FILES)


def usage(folder: Path, overlay: Path, most_files: int) -> DiskUsage:
    """Not exact while processes write. Counts no further than `most_files`.

    overlay: another mount, by which processes may have opened files of the folder
    """
    files = 0
    sizes: dict[tuple[int, int], int] = {}  # hard links, and deleted files
    size = 0
    for each in _below(str(folder)):
        files += 1
        if files > most_files:
            break
        with contextlib.suppress(OSError):  # removed meanwhile
            status = each.stat(follow_symlinks=False)
            if status.st_nlink > 1:
                sizes[status.st_dev, status.st_ino] = status.st_blocks * BLOCK
            else:
                size += status.st_blocks * BLOCK
    devices = {each.stat().st_dev for each in (folder, overlay)}
    sizes |= {(each.st_dev, each.st_ino): each.st_blocks * BLOCK for each in _deleted_files() if each.st_dev in devices}
    return DiskUsage((size + sum(sizes.values())) / MIB, files)


def _below(folder: str) -> Iterator[os.DirEntry[str]]:
    waiting = [folder]
    while waiting:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                yield entry
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)


def _deleted_files() -> Iterator[os.stat_result]:
    """Deleted files that a process has open."""
    for name in glob.iglob("/proc/[0-9]*/task/*/fd/*"):  # noqa: PTH207  which skips what has ended
        with contextlib.suppress(OSError):  # closed meanwhile
            status = Path(name).stat()
            if status.st_nlink == 0 and stat.S_ISREG(status.st_mode):
                yield status
