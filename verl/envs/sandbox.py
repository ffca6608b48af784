"""The sandbox interface: code in, output out. Whatever the code does, only an `Execution` is returned."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits per execution; an execution that exceeds one is killed with all of its processes."""

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_mib: int = 1024
    processes: int = 32
    file_mib: int = 16  # total size of written files
    output_kib: int = 256  # for stdout and stderr each; the rest is dropped


class Status(StrEnum):
    """How an execution ended."""

    FINISHED = "finished"  # with exit code 0
    ERROR = "error"  # nonzero exit code, signal, out of memory
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Execution:
    """The result of one execution."""

    status: Status
    stdout: str
    stderr: str
    return_code: int | None  # None if killed
    seconds: float
    files: Mapping[str, bytes] = field(default_factory=dict)  # the requested ones
    killed: str = ""  # the limit that ended it, also printed on stderr
    left_out: Mapping[str, str] = field(default_factory=dict)  # requested files that are there, and why not in `files`


class Session(Protocol):
    """An interpreter that keeps its variables between calls."""

    async def run(self, code: str, limits: Limits | None = None) -> Execution:
        """Run code; after a limit killed the session, the next call starts a fresh interpreter."""

    async def close(self) -> None:
        """Terminate its process."""


class Sandbox(Protocol):
    """Runs code concurrently. Raises verl.errors.ServiceDownError if the sandbox itself fails."""

    async def run(
        self,
        code: str,
        language: str = "python",  # python | bash
        stdin: str = "",
        files: Mapping[str, bytes] | None = None,  # paths relative to the working folder
        fetch: Sequence[str] = (),  # files to return
        limits: Limits | None = None,
    ) -> Execution:
        """Run code in its own process, isolated from all others."""

    async def session(self) -> Session:
        """Start a fresh interpreter."""

    async def close(self) -> None:
        """Terminate all processes."""
