"""An end that ends: what hangs while a command tidies up is killed, and its watcher (verl/watcher.py) tidies up."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

import psutil

from verl import watcher

END_S = 30.0  # of a run that failed or was stopped
REGULAR_END_S = 90.0  # of one that has done all it should

_current: ContextVar[Deadline | None] = ContextVar("deadline", default=None)


class Deadline:
    """Of the command that runs in this process, once it has begun to end."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._returned = threading.Event()
        self._code, self._message = 0, ""

    @contextmanager
    def of_this_command(self) -> Iterator[None]:
        """`begin_end` in the block is about this one. After the block, what is left to do is the interpreter's end."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)
            self._returned.set()

    def begin(self, code: int, message: str = "", regular: bool = False) -> None:
        """From now on the command ends within a time, with this exit code; the first failure decides on it.

        message: printed if the end is cut short, because nobody else could
        regular: all is done, and what is left may take longer
        """
        if self._thread is None or not self._code:
            self._code, self._message = code, message
        if self._thread is None:
            started, seconds = _family(), REGULAR_END_S if regular else END_S
            self._thread = threading.Thread(target=self._watch, args=(seconds, started), name="deadline", daemon=True)
            self._thread.start()

    def _watch(self, seconds: float, started: list[psutil.Process]) -> None:
        if self._returned.wait(seconds):
            threading.main_thread().join()  # until the interpreter ends, which waits for others, too
            time.sleep(seconds)
        lines = [self._message, f"The end took more than {seconds:.0f} s: what hangs was killed."]
        with suppress(OSError):
            os.write(1, "".join(f"{line}\n" for line in lines if line).encode(errors="replace"))
        for process in {*started, *_family()}:
            with suppress(psutil.Error):
                if watcher.__file__ in process.cmdline():
                    process.resume()  # it removes what is left, as soon as this process is gone
                else:
                    process.kill()
        os._exit(self._code)


def begin_end(code: int, message: str = "", regular: bool = False) -> None:
    """As `Deadline.begin` of the command that runs here; nothing where the package is used without a command."""
    deadline = _current.get()
    if deadline is not None:
        deadline.begin(code, message, regular)


def _family() -> list[psutil.Process]:
    return list(psutil.Process().children(recursive=True))
