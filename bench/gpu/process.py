"""The process of a session, for the driver: requests, answers, time limits, and an end for all that it started."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil

_POLL_S = 0.05
_ORDERLY_END_S = 10.0  # for a session to close its engine
_SET_CHILD_SUBREAPER = 36  # of prctl


class OverrunError(Exception):
    """No answer within the limit."""


class DiedError(Exception):
    """The process ended instead of answering."""


class SessionProcess:
    """Runs bench/gpu/child.py in a process group of its own.

    Answers come as lines through a pipe of their own: libraries write to standard output, and a file needs a disk with
    room. Processes that outlive a session hold the pipe, so its end means nothing. Raises DiedError.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        self._received = b""
        reading, answers = os.pipe()
        self._answers = os.fdopen(reading, "rb", buffering=0)
        command = [sys.executable, "-m", "bench.gpu.child", str(os.getpid()), str(answers), *arguments]
        try:
            with _opened(log) as output:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    env=environment,
                    process_group=0,
                    pass_fds=(answers,),
                )
        except OSError as error:
            raise DiedError(f"its process cannot be started ({error})") from error
        finally:
            os.close(answers)

    def ask(self, name: str, limit: float) -> dict[str, Any]:
        """The answer for one measurement. Raises OverrunError or DiedError; the session is then over."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died; reported below
            self._process.stdin.write(f"{name} {limit}\n".encode())
            self._process.stdin.flush()
        deadline = time.monotonic() + limit
        while True:
            has_ended = self._process.poll() is not None
            if answer := self._next_line():
                found: dict[str, Any] = json.loads(answer)
                return found
            if has_ended:
                raise DiedError(f"its process {_described(self._process.returncode)}{self._last_line()}")
            if time.monotonic() > deadline:
                raise OverrunError(f"not finished within {limit:.0f} s")

    def _next_line(self) -> bytes:
        """Of the answers, or nothing if it has not come within _POLL_S."""
        if select.select([self._answers], [], [], _POLL_S)[0]:
            self._received += self._answers.read(2**16)
        line, end, rest = self._received.partition(b"\n")
        if not end:
            return b""
        self._received = rest
        return line

    def close(self) -> None:
        """Let it end in order, then kill what is left."""
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._process.communicate(timeout=_ORDERLY_END_S)
        self.kill()

    def kill(self) -> None:
        """Kill the process, its group, and whatever else it started, daemons included.

        One that hangs within the kernel, in a call of the GPU's driver, does not end: it is left behind.
        """
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ORDERLY_END_S)
        kill_descendants()
        self._answers.close()

    def _last_line(self) -> str:
        lines = self.log.read_text(errors="replace").split("\n") if self.log.exists() else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"; its log ends with: {last[:300]}" if last else ""


def _opened(log: Path) -> IO[bytes]:
    """For appending; without room for it, what is written is lost."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return log.open("ab")
    except OSError:
        return Path(os.devnull).open("ab")


def adopt_orphans() -> None:
    """Let processes whose parent ended become children of this process, so that `kill` finds daemons, too."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_descendants() -> None:
    """Children, and theirs."""
    deadline = time.monotonic() + _ORDERLY_END_S
    while (left := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        for each in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(left, timeout=1)  # those whose parents were killed are ours a moment later


def _described(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
