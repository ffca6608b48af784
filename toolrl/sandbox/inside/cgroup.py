"""The cgroup of this supervisor and its processes, as files opened by the owner: no other cgroup is visible.

The supervisor itself is a member, so that its forks are members from the start at no cost: moving a process takes the
kernel many milliseconds. Memory that the supervisor holds before an execution is not charged to the execution.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from .kernel import MIB

UNLIMITED = 1 << 62  # bytes
MOST_PROCESSES = 1 << 22  # the kernel's maximum
RESIDUE = 32 * MIB  # memory of past executions that triggers a reclaim
SIZE = 1 << 12  # maximum content of these files


class Cgroup:
    """Limits and usage of all processes of one execution.

    purposes: of the descriptors. join (there may be several), memory_max, memory_used, memory_events, reclaim,
    processes_max, cpu_ns or cpu_stat (in microseconds); cell and freeze (for the processes of a session) are optional
    """

    def __init__(self, purposes: Sequence[str], descriptors: Sequence[int]) -> None:
        self._files: dict[str, int] = dict(zip(purposes, descriptors, strict=True))
        for purpose, descriptor in zip(purposes, descriptors, strict=True):
            if purpose == "join":
                os.write(descriptor, b"0")
        self._oom_kills = 0

    @property
    def freezes(self) -> bool:
        return "freeze" in self._files

    def begin(self, limits: Mapping[str, Any]) -> None:
        """Set the limits of the next execution. Memory still charged from before is not counted."""
        used = int(self._read("memory_used"))
        if used > RESIDUE and "reclaim" in self._files:
            with contextlib.suppress(OSError):  # less was freed
                self._write("reclaim", used)
            used = int(self._read("memory_used"))
        self._write("memory_max", used + limits["memory_mib"] * MIB)
        self._write("processes_max", min(limits["processes"] + 1, MOST_PROCESSES))  # plus this process
        self._oom_kills = self._count_oom_kills()

    def end(self) -> None:
        """Lift the memory limit: only the supervisor is left, which may need memory to answer."""
        self._write("memory_max", UNLIMITED)

    def cpu_s(self) -> float:
        """Total CPU time of all past and present members."""
        if "cpu_ns" in self._files:
            return int(self._read("cpu_ns")) / 1e9
        return _field(self._read("cpu_stat"), b"usage_usec") / 1e6

    def out_of_memory(self) -> bool:
        """Whether the kernel's OOM killer hit a process of this execution."""
        return self._count_oom_kills() > self._oom_kills

    def take(self, pid: int) -> None:
        """Add a session's first process: `freeze` applies to it and its descendants."""
        if self.freezes:
            self._write("cell", pid)

    def freeze(self, on: bool) -> None:
        """Freeze or thaw the processes of a session. Frozen processes can be killed."""
        self._write("freeze", int(on))

    def _count_oom_kills(self) -> int:
        return _field(self._read("memory_events"), b"oom_kill")

    def _read(self, purpose: str) -> bytes:
        return os.pread(self._files[purpose], SIZE, 0)

    def _write(self, purpose: str, number: int) -> None:
        os.pwrite(self._files[purpose], b"%d" % number, 0)


def _field(text: bytes, name: bytes) -> int:
    for line in text.splitlines():
        key, _, value = line.partition(b" ")
        if key == name:
            return int(value)
    return 0
