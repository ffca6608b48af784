"""Shutdown deadline: hanging processes are killed, and verl/host/watcher.py cleans up."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

import psutil

from verl.host import watcher

SHUTDOWN_S = 30.0  # after a failure or a signal
REGULAR_SHUTDOWN_S = 90.0  # after a successful run

_current: ContextVar[Deadline | None] = ContextVar("deadline", default=None)


class Deadline:
    """Time limit for the shutdown of the command in this process."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._returned = threading.Event()
        self._code, self._message = 0, ""

    @contextmanager
    def active(self) -> Iterator[None]:
        """`start_shutdown_timer` acts on this one; after the block only the interpreter has to exit."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)
            self._returned.set()

    def start(self, code: int, message: str = "", regular: bool = False) -> None:
        """Start the timer. At a forced exit the exit code and message of the first failure are used.

        message: printed at a forced exit, where the command itself cannot print it
        regular: the run was successful, so the shutdown may take longer
        """
        if self._thread is None or not self._code:
            self._code, self._message = code, message
        if self._thread is None:
            children = psutil.Process().children(recursive=True)
            seconds = REGULAR_SHUTDOWN_S if regular else SHUTDOWN_S
            self._thread = threading.Thread(target=self._watch, args=(seconds, children), name="deadline", daemon=True)
            self._thread.start()

    def _watch(self, seconds: float, children: list[psutil.Process]) -> None:
        if self._returned.wait(seconds):
            threading.main_thread().join()  # until the interpreter exits, which waits for other threads too
            time.sleep(seconds)
        lines = [self._message, f"Shutdown took more than {seconds:.0f} s; hanging processes were killed."]
        with suppress(OSError):
            os.write(1, "".join(f"{line}\n" for line in lines if line).encode(errors="replace"))
        for process in {*children, *psutil.Process().children(recursive=True)}:
            with suppress(psutil.Error):
                if watcher.__file__ in process.cmdline():
                    process.resume()  # it cleans up as soon as this process is gone
                else:
                    process.kill()
        os._exit(self._code)


def start_shutdown_timer(code: int, message: str = "", regular: bool = False) -> None:
    """`Deadline.start` of the active command; a no-op where the package is used as a library."""
    deadline = _current.get()
    if deadline is not None:
        deadline.start(code, message, regular)
