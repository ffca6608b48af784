"""Folders that are locked while their owner lives, so that those of a killed process are known and removed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from functools import cached_property
from pathlib import Path

from verl.host.watcher import remove_tree

PREFIX = "verl-runtimes-"
LOCK = ".lock"


class OwnedFolder:
    """A folder that ends with its owner. place: of it, on a disk; default: the temporary folder"""

    def __init__(self, place: Path | None) -> None:
        self._place = place
        self._lock: int | None = None

    @cached_property
    def path(self) -> Path:
        """Made when needed, and removed by `remove`; that of a killed process by the watcher of its run, or here."""
        place = self._place or Path(os.environ.get("TMPDIR") or tempfile.gettempdir())  # TMPDIR: the run's own
        place.mkdir(parents=True, exist_ok=True)
        remove_abandoned(place)
        folder, self._lock = new_folder(place)
        return folder

    def remove(self) -> None:
        if self._lock is not None:
            remove_tree(self.path)
            os.close(self._lock)
            self._lock = None


def new_folder(place: Path) -> tuple[Path, int]:
    """A folder, and the descriptor that locks it."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
    descriptor, unnamed = tempfile.mkstemp(dir=folder)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    Path(unnamed).rename(folder / LOCK)  # locked before it is seen
    return folder, descriptor


def remove_abandoned(place: Path) -> None:
    """Those of this user whose owner has ended."""
    for folder in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.getuid():
                descriptor = os.open(folder / LOCK, os.O_RDWR)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its owner lives
                    remove_tree(folder)
                finally:
                    os.close(descriptor)
