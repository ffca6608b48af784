"""What a runtime holds on disk: files and folders below one, and deleted files that its processes have open.

Not counted: deleted files that are only mapped, or whose descriptor waits in a socket.
"""

import contextlib
import glob
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MIB = 1024 * 1024
BLOCK = 512  # bytes, of st_blocks
LEAST_MIB, LEAST_FILES = 64, 1000  # free on the disk, for all that use it


class DiskUsage(NamedTuple):
    mib: float  # of blocks, each file once, whatever its names
    files: int  # names of files, folders and links


def has_room(folder: Path) -> bool:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize >= LEAST_MIB * MIB and (found.f_files == 0 or found.f_favail >= LEAST_FILES)


def usage(folder: Path, overlay: Path, most_files: int) -> DiskUsage:
    """Not exact while processes write. Counts no further than `most_files`.

    overlay: another mount, by which processes may have opened files of the folder
    """
    files = 0
    sizes: dict[tuple[int, int], int] = {}  # of files with several names, and of deleted ones
    size = 0
    for each in _below(str(folder)):
        files += 1
        if files > most_files:
            break
        with contextlib.suppress(OSError):  # removed meanwhile
            found = each.stat(follow_symlinks=False)
            if found.st_nlink > 1:
                sizes[found.st_dev, found.st_ino] = found.st_blocks * BLOCK
            else:
                size += found.st_blocks * BLOCK
    devices = {each.stat().st_dev for each in (folder, overlay)}
    sizes |= {(each.st_dev, each.st_ino): each.st_blocks * BLOCK for each in _deleted() if each.st_dev in devices}
    return DiskUsage((size + sum(sizes.values())) / MIB, files)


def _below(folder: str) -> Iterator[os.DirEntry[str]]:
    waiting = [folder]
    while waiting:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                yield entry
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)


def _deleted() -> Iterator[os.stat_result]:
    """Deleted files that a process has open."""
    for name in glob.iglob("/proc/[0-9]*/task/*/fd/*"):  # noqa: PTH207  which skips what has ended
        with contextlib.suppress(OSError):  # closed meanwhile
            found = Path(name).stat()
            if found.st_nlink == 0 and stat.S_ISREG(found.st_mode):
                yield found
