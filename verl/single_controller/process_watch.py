"""Processes that are stopped (SIGSTOP): whoever waits for one waits for ever, and nothing ever fails."""

from __future__ import annotations

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
    """Where process ids mean the same: one boot of one machine, and one container of it."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def statuses(pids: Iterable[int]) -> dict[int, str]:
    """psutil's word for the state of each process of this machine that exists."""
    found = {}
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            found[pid] = psutil.Process(pid).status()
    return found


def end_of_child(pid: int) -> str:
    """How a child of this process has ended, once it has; empty where somebody else was first to ask for it.

    It is left to be collected by whoever started it.
    """
    try:
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        return ""
    assert end is not None
    if end.si_code == os.CLD_EXITED:
        return f"ended with exit code {end.si_status}"
    return f"was killed by {signal.Signals(end.si_status).name}"


def oom_kills(vmstat: Path = Path("/proc/vmstat")) -> int:
    """Processes that the kernel of this machine has killed for lack of memory since it started; 0 if it tells none."""
    try:
        lines = vmstat.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


class StopWatch:
    """Tells processes that stay stopped from those that go on within `timeout_s`.

    One that a debugger holds is in another state and is left alone.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._since: dict[Hashable, float] = {}

    def lost(self, statuses: Mapping[_Key, str]) -> list[_Key]:
        """Those that were stopped at every look for `timeout_s`. statuses: of all processes that are watched"""
        now = self._clock()
        stopped = [key for key, status in statuses.items() if status == psutil.STATUS_STOPPED]
        self._since = {key: self._since.get(key, now) for key in stopped}
        return [key for key in stopped if now - self._since[key] >= self.timeout_s]

    @property
    def reason(self) -> str:
        """What is said of one that is lost."""
        return f"does not answer since {self.timeout_s:g} s; its process is stopped"
