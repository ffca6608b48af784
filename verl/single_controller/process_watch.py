"""Detection of stopped processes (SIGSTOP), for which others would wait forever."""

import os
import signal
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil

_Key = TypeVar("_Key", bound=Hashable)


def machine() -> str:
    """Identifies a process-id namespace: one boot of one machine, and one container on it."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def statuses(pids: Iterable[int]) -> dict[int, str]:
    """psutil's status of each process on this machine that exists."""
    found = {}
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            found[pid] = psutil.Process(pid).status()
    return found


def end_of_child(pid: int) -> str:
    """How a child ended; waits, without reaping it. Empty if it was already reaped."""
    try:
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        return ""
    assert end is not None
    if end.si_code == os.CLD_EXITED:
        return f"ended with exit code {end.si_status}"
    return f"was killed by {signal.Signals(end.si_status).name}"


def oom_kills(vmstat: Path = Path("/proc/vmstat")) -> int:
    """Number of processes killed out of memory since boot; 0 if not available."""
    try:
        lines = vmstat.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


class StopWatch:
    """Processes that stay stopped for `timeout_s`; under a debugger the state is another."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._since: dict[Hashable, float] = {}

    def lost(self, statuses: Mapping[_Key, str]) -> list[_Key]:
        """Those stopped at every call for `timeout_s`. statuses: of all watched processes"""
        now = self._clock()
        stopped = [key for key, status in statuses.items() if status == psutil.STATUS_STOPPED]
        self._since = {key: self._since.get(key, now) for key in stopped}
        return [key for key in stopped if now - self._since[key] >= self.timeout_s]

    @property
    def reason(self) -> str:
        return f"has not responded for {self.timeout_s:g} s; its process is stopped"
