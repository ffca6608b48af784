"""A scoring process and the thread that watches it and kills it when it exceeds a limit.

Time limits (the reward timeout) count only ticks in which the process could run: neither a stopped process nor a
suspended machine uses up the time. The clock of a response starts when a ready process takes it.
"""

import contextlib
import ctypes
import json
import math
import multiprocessing
import os
import resource
import signal
import socket
import sysconfig
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

import psutil

from verl.host.packages import OURS
from verl.rollout.finite import finite_score
from verl.scoring.rewards import Rewards, build_rewards
from verl.types import Score, Task, Trajectory

_TICK_S = 0.25
_START_S = 120.0  # time to import and build the rewards
_GONE_S = 5.0  # time for a killed process to exit
_HALTED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_DISK_SLEEP)
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
_PR_SET_PDEATHSIG = 1
_PATHS = sysconfig.get_paths()
_LIBRARIES = ("<frozen", *map(str, OURS), *(_PATHS[name] for name in ("stdlib", "purelib", "platlib")))

Call = tuple[Trajectory, Task, int]  # and the step


@dataclass(frozen=True, slots=True)
class ScoringLimits:
    """Limits for scoring one response, and what happens when it exceeds one.

    timeout_s: per response
    memory_mib: data segment of the process; None: no limit
    fault_policy: for a response over a limit: "policy": scored as an empty response; "infrastructure": dropped
    health_timeout_s: a process that is stopped for longer is killed
    """

    timeout_s: float = 20.0
    memory_mib: int | None = 4096
    fault_policy: str = "policy"
    health_timeout_s: float = 30.0


class RewardError(Exception):
    """The reward raised, or returned something other than a score."""


class LimitExceededError(Exception):
    """Scoring the response exceeds its time or memory limit."""


class ProcessDiedError(Exception):
    """The process died; crashed: its own code failed (e.g. SIGSEGV), rather than a signal from outside."""

    def __init__(self, problem: str, crashed: bool) -> None:
        super().__init__(problem)
        self.crashed = crashed


class Process(Protocol):
    """A scoring process, as its owner sees it."""

    @property
    def pid(self) -> int:
        """Process id of the operating system."""

    @property
    def cause_of_death(self) -> str | None:
        """None while the process is alive."""

    def wait_until_ready(self) -> None:
        """Raises RewardError if the reward cannot be built in the process, and ProcessDiedError."""

    def score(self, call: Call) -> Score:
        """The score. Raises RewardError, LimitExceededError and ProcessDiedError."""

    def kill(self) -> None:
        """Kill the process group; a pending `score` call raises ProcessDiedError. Thread-safe."""

    def close(self) -> None:
        """Kill the process and wait until it is gone."""


StartProcess = Callable[[str, str, ScoringLimits], Process]  # name and options (JSON) of the reward


class ScoringProcess:
    """A process used by one thread, its owner; it ends with the owner."""

    def __init__(self, name: str, options: str, limits: ScoringLimits) -> None:
        """name, options (JSON): the default reward, for tasks that name none."""
        self._limits = limits
        self._verdict: Exception | None = None  # why the watcher killed it
        self._calls = 0
        self._lock = threading.Lock()  # guards the clock
        self._spent_s, self._allowed_s = 0.0, _START_S
        self._overrun: Exception = ProcessDiedError(f"did not start within {_START_S:g} s", crashed=False)
        context = multiprocessing.get_context("spawn")  # a fork would copy locks that other threads hold
        self._channel, theirs = context.Pipe()
        arguments = (theirs, name, options, limits.memory_mib)
        self._process = context.Process(target=_serve, args=arguments, name="verl-scorer")
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self._watcher = threading.Thread(target=self._watch, name="verl-scorer-watch", daemon=True)
        self._watcher.start()

    def wait_until_ready(self) -> None:
        """Raises RewardError if the reward cannot be built in the process, and ProcessDiedError."""
        try:
            problem = self._channel.recv()
        except (EOFError, OSError):
            raise self._cause() from None
        self._set_clock(math.inf)
        if problem:
            raise RewardError(problem)

    def score(self, call: Call) -> Score:
        """The score. Raises RewardError, LimitExceededError and ProcessDiedError."""
        limit_s, memory_mib = self._limits.timeout_s, self._limits.memory_mib
        self._overrun = LimitExceededError(f"the reward took longer than {limit_s:g} s (reward.timeout_s)")
        self._set_clock(limit_s)
        self._calls += 1
        try:
            self._channel.send((self._calls, call))
            number = 0
            while number != self._calls:
                number, kind, value = self._channel.recv()
        except (EOFError, OSError):
            raise self._cause() from None
        finally:
            self._set_clock(math.inf)
        if kind == "memory":
            raise LimitExceededError(f"the reward needs more than {memory_mib} MiB (reward.memory_mib)")
        if kind == "raised":
            raise RewardError(value)
        assert isinstance(value, Score)
        return value

    @property
    def cause_of_death(self) -> str | None:
        """None while the process is alive."""
        return None if self._watcher.is_alive() else str(self._cause())

    def kill(self) -> None:
        """Kill the process group; a pending `score` call raises ProcessDiedError. Thread-safe."""
        self._kill_group()
        self._process.kill()

    def close(self) -> None:
        """Kill the process and wait until it is gone."""
        if self._watcher.is_alive():
            self.kill()
            self._watcher.join(_GONE_S)
        self._channel.close()

    def _set_clock(self, allowed_s: float) -> None:
        with self._lock:
            self._spent_s, self._allowed_s = 0.0, allowed_s

    def _watch(self) -> None:
        halted_s = 0.0
        while not wait([self._process.sentinel], _TICK_S):
            if self._is_halted():
                halted_s += _TICK_S
                if halted_s > self._limits.health_timeout_s:
                    self._give_up(ProcessDiedError(f"was stopped for {halted_s:g} s and then killed", crashed=False))
                continue
            halted_s = 0.0
            with self._lock:
                self._spent_s += _TICK_S
                if self._spent_s > self._allowed_s:
                    self._give_up(self._overrun)
        self._process.join()
        self._kill_group()  # its children
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._channel.fileno())) as ours:
            ours.shutdown(socket.SHUT_RDWR)  # wakes the owner, even if another process holds the other end

    def _is_halted(self) -> bool:
        try:
            return psutil.Process(self.pid).status() in _HALTED
        except (psutil.Error, OSError):  # out of file descriptors: the clock keeps running
            return False

    def _give_up(self, verdict: Exception) -> None:
        self._verdict = self._verdict or verdict
        self.kill()

    def _kill_group(self) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)

    def _cause(self) -> Exception:
        self._watcher.join(_GONE_S)  # it collects the exit status
        if self._verdict is not None:
            return self._verdict
        code = self._process.exitcode
        if code is None:
            return ProcessDiedError("closed its channel", crashed=False)
        if code >= 0:
            return ProcessDiedError(f"exit code {code}", crashed=False)
        hint = ", sent from outside or by the kernel's OOM killer" if -code == signal.SIGKILL else ""
        return ProcessDiedError(f"{signal.Signals(-code).name}{hint}", crashed=-code in _CRASHES)


def _serve(channel: Connection, name: str, options: str, memory_mib: int | None) -> None:
    """Main function of the process: scores until its owner is gone."""
    _isolate(memory_mib)
    pid = os.getpid()
    try:
        rewards = build_rewards(name, json.loads(options))
    except BaseException as error:  # noqa: BLE001  users' code may raise anything
        channel.send(f"the reward cannot be built in the scoring process: {type(error).__name__}: {error}")
        return
    channel.send("")
    with contextlib.suppress(EOFError, OSError):
        while True:
            number, call = channel.recv()
            answer = _scored(rewards, call)
            if os.getpid() != pid:  # a child forked by the reward must not answer
                os._exit(0)
            channel.send((number, *answer))


def _isolate(memory_mib: int | None) -> None:
    """Own process group, shielded from Ctrl-C and killed as a whole; first candidate of the OOM killer.

    The limit is on data, not on address space, most of which GPU libraries reserve without using it.
    """
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    if memory_mib is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        soft = memory_mib << 20
        resource.setrlimit(resource.RLIMIT_DATA, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _scored(rewards: Rewards, call: Call) -> tuple[str, Any]:
    """("score", Score), or ("memory" or "raised", reason) with the reason as text, since errors may not pickle."""
    try:
        return "score", finite_score(rewards.score(*call))
    except MemoryError:
        return "memory", ""
    except BaseException as error:  # noqa: BLE001  users' code may raise anything
        return "raised", f"the reward raised {type(error).__name__}: {error}{_place(error)}"


def _place(error: BaseException) -> str:
    """The line of the user's code that raised it; empty if none did."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_LIBRARIES)]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""
