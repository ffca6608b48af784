"""Faults of the disk: Python reports every file that it opens, and every folder and name that it changes."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Disk:
    """Counts the changes below a folder, and calls `on_change` with the number and the name before each."""

    _hooked = False
    _active: ClassVar[list[Disk]] = []

    def __init__(self, folder: Path, on_change: Callable[[int, str], object]) -> None:
        """TensorBoard's files do not count: a thread of its own writes them, whenever it likes."""
        self._prefix, self._on_change = f"{folder}{os.sep}", on_change
        self._busy = threading.local()
        self.changes = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        if not Disk._hooked:
            Disk._hooked = True
            sys.addaudithook(Disk._on_event)  # it stays until the end of the process
        Disk._active.append(self)
        try:
            yield
        finally:
            Disk._active.remove(self)

    @staticmethod
    def _on_event(event: str, args: tuple[Any, ...]) -> None:
        if Disk._active and event in ("open", "os.rename", "os.mkdir"):
            for disk in Disk._active:
                disk._record(event, args)

    def _record(self, event: str, args: tuple[Any, ...]) -> None:
        path, *rest = args
        if event == "open" and not (isinstance(rest[1], int) and rest[1] & _WRITES):
            return
        if isinstance(path, int) or path is None or getattr(self._busy, "now", False):
            return
        name = os.fsdecode(path)
        if name.startswith(self._prefix) and "tensorboard" not in name:
            self._busy.now = True
            try:
                self.changes += 1
                self._on_change(self.changes, name.removeprefix(self._prefix))
            finally:
                self._busy.now = False


def no_space(name: str) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
