"""Do Ray's own processes on this machine run? Ray reports the death of one late, as that of a worker, or never."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import psutil

_PERIOD_S = 1.0
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


class Guard:
    """Watches processes by name, while it is used as a context. Where one has died or has been stopped for too long,
    `problem` says so, all are ended so that no call waits for them, and the futures that are awaited are cancelled."""

    def __init__(self, processes: Mapping[str, psutil.Process], stopped_s: float) -> None:
        """stopped_s: how long a process may be stopped (SIGSTOP)"""
        self.problem: str | None = None
        self._processes = dict(processes)
        self._stopped_s = stopped_s
        self._stopped_at: dict[str, float] = {}
        self._awaited: set[asyncio.Future[object]] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="guard", daemon=True)

    def __enter__(self) -> Guard:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def look(self) -> str | None:
        """The problem, found now or before."""
        with self._lock:
            if self.problem is None and not self._closed.is_set():
                self.problem = self._found(time.monotonic())
                if self.problem is not None:
                    self._end_all()
            return self.problem

    @contextmanager
    def cancelling(self, future: asyncio.Future[object]) -> Iterator[None]:
        """Cancel a future that is awaited meanwhile, once there is a problem."""
        with self._lock:
            self._awaited.add(future)
        try:
            if self.problem is not None:
                future.cancel()
            yield
        finally:
            with self._lock:
                self._awaited.discard(future)

    def _watch(self) -> None:
        while self.look() is None and not self._closed.wait(_PERIOD_S):
            pass

    def _found(self, now: float) -> str | None:
        for name, process in self._processes.items():
            who = f"the {name} (process {process.pid}) of this machine"
            status = _status(process)
            if status in _ENDED:
                return f"{who} died: killed from outside, or by the kernel for want of memory"
            if status not in _STOPPED:
                self._stopped_at.pop(name, None)
            elif now - self._stopped_at.setdefault(name, now) > self._stopped_s:
                return f"{who} has been stopped for more than {self._stopped_s:g} s (trainer.health_timeout_s)"
        return None

    def _end_all(self) -> None:
        for process in self._processes.values():
            with suppress(psutil.Error):
                process.kill()
        for future in self._awaited:
            with suppress(RuntimeError):  # its loop has ended
                future.get_loop().call_soon_threadsafe(future.cancel)


def _status(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return str(psutil.STATUS_DEAD)
