"""Folders that are locked while their owner lives, so that those of a killed process are known and removed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path

from verl.system.watcher import remove_tree

PREFIX = "verl-runtimes-"
LOCK = ".lock"


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
