"""Liveness of Ray's own processes: Ray reports their death late, as a worker's, or never."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import psutil

from verl.single_controller.process_watch import StopWatch

_PERIOD_S = 1.0
_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


class Guard:
    """Context manager that watches processes by name. If one dies or stays stopped for too long, sets `problem`, kills
    all of them so that no call waits for them, and cancels the awaited futures."""

    def __init__(self, processes: Mapping[str, psutil.Process], stopped_s: float) -> None:
        """stopped_s: timeout of a stopped process (SIGSTOP)"""
        self.problem: str | None = None
        self._processes = dict(processes)
        self._stops = StopWatch(stopped_s)
        self._awaited: set[asyncio.Future[object]] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._at_exit: list[Callable[[], object]] = []
        self._thread = threading.Thread(target=self._watch, name="guard", daemon=True)

    def __enter__(self) -> Guard:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for function in self._at_exit:
            function()
        self._closed.set()
        self._thread.join()

    def call_at_exit(self, function: Callable[[], object]) -> None:
        """Call it at the end of this context, before Ray's."""
        self._at_exit.append(function)

    def check(self) -> str | None:
        """The problem, found now or earlier; None if there is none."""
        with self._lock:
            if self.problem is None and not self._closed.is_set():
                self.problem = self._find_problem()
                if self.problem is not None:
                    self._kill_all()
            return self.problem

    @contextmanager
    def cancelling(self, future: asyncio.Future[object]) -> Iterator[None]:
        """Cancel a future that is awaited in this context if a problem occurs."""
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
        while self.check() is None and not self._closed.wait(_PERIOD_S):
            pass

    def _find_problem(self) -> str | None:
        statuses = {name: _status(process) for name, process in self._processes.items()}
        for name, status in statuses.items():
            if status in _ENDED:
                return f"{self._describe(name)} died: killed by another process, or by the kernel (out of memory)"
        for name in self._stops.lost(statuses):
            limit = f"{self._stops.timeout_s:g} s (trainer.health_timeout_s)"
            return f"{self._describe(name)} has been stopped for more than {limit}"
        return None

    def _describe(self, name: str) -> str:
        return f"the {name} (process {self._processes[name].pid}) on this machine"

    def _kill_all(self) -> None:
        for process in self._processes.values():
            with suppress(psutil.Error):
                process.kill()
        for future in self._awaited:
            with suppress(RuntimeError):  # its loop is closed
                future.get_loop().call_soon_threadsafe(future.cancel)


def _status(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return str(psutil.STATUS_DEAD)
