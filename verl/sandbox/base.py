"""What a sandbox is: code in, what it printed out. Whatever the code does, only `Execution` comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Limits:
    """What one execution may use; what exceeds is killed as a group."""

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_mib: int = 1024
    processes: int = 32
    file_mib: int = 16  # of all that it writes
    output_kib: int = 256  # of stdout, and of stderr; the rest is dropped


class Status(StrEnum):
    """How an execution ended."""

    FINISHED = "finished"  # with exit code 0
    ERROR = "error"  # the code's own: another exit code, a signal, out of memory
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Execution:
    """What came of one piece of code."""

    status: Status
    stdout: str
    stderr: str
    return_code: int | None  # None where it was killed
    seconds: float
    files: Mapping[str, bytes] = field(default_factory=dict)  # those that were asked for


class Session(Protocol):
    """An interpreter that keeps its variables between pieces of code."""

    async def run(self, code: str, limits: Limits | None = None) -> Execution:
        """Run it; a session that was killed by a limit starts anew with the next piece."""

    async def close(self) -> None:
        """End its process."""


class Sandbox(Protocol):
    """Runs code, many pieces at a time. Raises verl.errors.ServiceDownError where it is itself out of order."""

    async def run(
        self,
        code: str,
        language: str = "python",  # python | bash
        stdin: str = "",
        files: Mapping[str, bytes] | None = None,  # paths in the working folder
        fetch: Sequence[str] = (),  # files to bring back
        limits: Limits | None = None,
    ) -> Execution:
        """One piece of code in a process of its own that sees nothing of any other."""

    async def session(self) -> Session:
        """A fresh interpreter of its own."""

    async def close(self) -> None:
        """End every process."""
