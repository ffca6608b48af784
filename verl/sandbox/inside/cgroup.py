"""The cgroup of this supervisor and of all that it starts, as files that the owner has opened: it sees no others.

The supervisor itself is in it, so that a fork is in it from its first moment on, at no cost: to move a process takes
the kernel many milliseconds. What the supervisor holds before an execution is not charged to that.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

MIB = 1024 * 1024
UNLIMITED = 1 << 62  # bytes
MOST_PROCESSES = 1 << 22  # the kernel takes no larger limit
RESIDUE = 32 * MIB  # of ended executions, from which on the kernel is asked to free it
SIZE = 1 << 12  # of what these files hold


class Cgroup:
    """Limits and counts of the processes of one execution together.

    purposes: of the descriptors. join (all take a process), memory_max, memory_used, memory_events, reclaim,
    processes_max, cpu_ns or cpu_stat (in microseconds); cell and freeze (of the processes of a session) may be missing
    """

    def __init__(self, purposes: Sequence[str], descriptors: Sequence[int]) -> None:
        self._files: dict[str, int] = dict(zip(purposes, descriptors, strict=True))
        for purpose, descriptor in zip(purposes, descriptors, strict=True):
            if purpose == "join":
                os.write(descriptor, b"0")
        self._oom_kills = 0

    @property
    def freezes(self) -> bool:
        """Whether `freeze` does anything."""
        return "freeze" in self._files

    def begin(self, limits: Mapping[str, Any]) -> None:
        """Limit what is started from now on. Memory that stays charged from before does not count."""
        used = int(self._read("memory_used"))
        if used > RESIDUE and "reclaim" in self._files:
            self._reclaim(used)
            used = int(self._read("memory_used"))
        self._write("memory_max", used + limits["memory_mib"] * MIB)
        self._write("processes_max", min(limits["processes"] + 1, MOST_PROCESSES))  # this one, too
        self._oom_kills = self._count_oom_kills()

    def end(self) -> None:
        """Nobody is left but the supervisor, who may need memory to answer."""
        self._write("memory_max", UNLIMITED)

    def cpu_s(self) -> float:
        """Of all that ever ran in it."""
        if "cpu_ns" in self._files:
            return int(self._read("cpu_ns")) / 1e9
        return _field(self._read("cpu_stat"), b"usage_usec") / 1e6

    def out_of_memory(self) -> bool:
        """Whether the kernel has killed a process of this execution for its memory."""
        return self._count_oom_kills() > self._oom_kills

    def take(self, pid: int) -> None:
        """A session's first process: `freeze` is for it and all that it starts."""
        if self.freezes:
            self._write("cell", pid)

    def freeze(self, on: bool) -> None:
        """Stop the processes of a session, or let them go on. What is frozen can be killed."""
        self._write("freeze", int(on))

    def _count_oom_kills(self) -> int:
        return _field(self._read("memory_events"), b"oom_kill")

    def _reclaim(self, size: int) -> None:
        try:
            self._write("reclaim", size)
        except OSError:
            return  # less than that could be freed

    def _read(self, purpose: str) -> bytes:
        return os.pread(self._files[purpose], SIZE, 0)

    def _write(self, purpose: str, number: int) -> None:
        os.pwrite(self._files[purpose], b"%d" % number, 0)


def _field(text: bytes, name: bytes) -> int:
    """The number after a name, in lines of both."""
    for line in text.splitlines():
        key, _, value = line.partition(b" ")
        if key == name:
            return int(value)
    return 0
