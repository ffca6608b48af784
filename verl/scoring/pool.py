"""Scoring in worker processes that are restarted when they die: a reward that hangs or crashes must not stop a run.

If a process dies, its response is scored again by a fresh one (rewards are deterministic); if that dies too, the
response is lost (a Fault). A response that exceeds a limit (`ScoringLimits`) or crashes both processes is the policy's
fault: it gets the score of an empty response, unless the limits specify otherwise.
"""

import asyncio
import contextlib
import json
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, Self

from verl.host.threads import SYSTEM, Queue, Threads
from verl.rollout.finite import finite_score
from verl.scoring.process import (
    Call,
    LimitExceededError,
    Process,
    ProcessDiedError,
    RewardError,
    ScoringLimits,
    ScoringProcess,
    StartProcess,
)
from verl.types import Score, Task, ToolUse, Trajectory
from verl.utils.reward_score.base import Reward

_log = logging.getLogger(__name__)
_IDLE_CHECK_S = 1.0
_CLOSE_S = 10.0


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a response has no score: a failure of a service or of the reward, not of the policy."""

    task_id: str
    index: int
    problem: str
    lost_uses: tuple[ToolUse, ...] = ()  # tool uses of the failed attempts

    def __str__(self) -> str:
        return f"{self.task_id}, response {self.index}: {self.problem}"


class Scorer(Protocol):
    """Scores trajectories concurrently."""

    async def score(self, trajectory: Trajectory, task: Task, step: int) -> Score | Fault:
        """The score, or a Fault. Never raises an exception of the reward."""

    def close(self) -> None:
        """Stop the workers."""


@dataclass(frozen=True, slots=True)
class DirectScorer:
    """Scores in this process, without a timeout: for tests and trusted rewards."""

    reward: Reward

    async def score(self, trajectory: Trajectory, task: Task, step: int) -> Score | Fault:
        try:
            return finite_score(self.reward.score(trajectory, task, step))
        except Exception as error:  # noqa: BLE001  users' code may raise anything
            return Fault(task.id, trajectory.index, f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """No-op: there are no workers."""


class ScoringPool:
    """Scores in separate processes; one thread per process sends it jobs and restarts it.

    Workers inherit this process's environment, so the reward's variables reach them on any cluster.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        num_workers: int,
        limits: ScoringLimits | None = None,
        start: StartProcess = ScoringProcess,
        threads: Threads = SYSTEM,
    ) -> None:
        """name, options: the default reward, for tasks that name none. Every process builds it for itself."""
        self._jobs: Queue = threads.queue()  # (job, call), or None: the end
        self._closed = threading.Event()
        limits = limits or ScoringLimits()
        start_one = partial(start, name, json.dumps(dict(options)), limits)
        self._workers = [_Worker(start_one, limits, self._jobs, self._closed) for _ in range(num_workers)]
        self._threads = [threads.start("verl-scoring", worker.run) for worker in self._workers]

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers if worker.process is not None]

    async def score(self, trajectory: Trajectory, task: Task, step: int) -> Score | Fault:
        if self._closed.is_set():
            raise RuntimeError("the scoring pool is closed")
        job: Future[Score | Fault] = Future()
        self._jobs.put((job, (trajectory, task, step)))
        return await asyncio.wrap_future(job)

    def close(self) -> None:
        """Stop the processes; unfinished jobs are canceled."""
        self._closed.set()
        for worker in self._workers:
            self._jobs.put(None)
            if (process := worker.process) is not None:  # its thread may drop it meanwhile
                process.kill()
        for thread in self._threads:
            thread.join(_CLOSE_S)
        while not self._jobs.empty():
            if (left := self._jobs.get()) is not None:
                left[0].cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Worker:
    """Takes the pool's jobs, in a thread; owns a scoring process and restarts it when needed."""

    def __init__(
        self, start: Callable[[], Process], limits: ScoringLimits, jobs: Queue, closed: threading.Event
    ) -> None:
        self._start, self._limits, self._jobs, self._closed = start, limits, jobs, closed
        self.process: Process | None = None

    def run(self) -> None:
        try:
            self._start_idle()
            while not self._closed.is_set():
                try:
                    taken = self._jobs.get(timeout=_IDLE_CHECK_S)
                except queue.Empty:
                    self._replace_dead()
                    continue
                if taken is None or not taken[0].set_running_or_notify_cancel():
                    continue
                job, call = taken
                try:
                    job.set_result(self._score(call))
                except BaseException as error:  # noqa: BLE001  raised in the caller
                    job.set_exception(error)
        finally:
            self._drop_process()

    def _score(self, call: Call) -> Score | Fault:
        try:
            return self._score_twice(call)
        except RewardError as error:
            return _fault(call, str(error))
        except ProcessDiedError as error:
            return _fault(call, f"the reward's process died twice ({error})")
        except LimitExceededError as error:
            self._drop_process()  # killed, or in an undefined state after a MemoryError
            if self._limits.fault_policy == "infrastructure":
                return _fault(call, str(error))
            return self._score_empty(call, str(error))

    def _score_twice(self, call: Call) -> Score:
        """Retries once in a fresh process if the first one dies. Raises what ScoringProcess.score raises."""
        self._replace_dead()
        try:
            return self._ready_process().score(call)
        except ProcessDiedError as first:
            self._drop_process()
            if self._closed.is_set():
                raise
            _log.warning("a scoring process died while scoring (%s); retrying the response once", first)
            try:
                return self._ready_process().score(call)
            except ProcessDiedError as second:
                if first.crashed and second.crashed:
                    raise LimitExceededError(f"the reward's process crashes on this response ({second})") from None
                raise

    def _score_empty(self, call: Call, exceeded: str) -> Score | Fault:
        """The score of the episode with empty responses, which every reward can score quickly."""
        trajectory, task, step = call
        turns = [
            replace(turn, message=replace(turn.message, content="", tool_calls=()), parsed=None, other_end="")
            for turn in trajectory.turns
        ]
        try:
            score = self._score_twice((replace(trajectory, turns=tuple(turns), decoded=""), task, step))
        except (RewardError, ProcessDiedError, LimitExceededError) as error:
            return _fault(call, f"{exceeded}; scoring an empty response failed too: {error}")
        return replace(score, exceeded=exceeded)

    def _start_idle(self) -> None:
        """Start ahead of the first job, which reports any error."""
        with contextlib.suppress(RewardError, ProcessDiedError):
            self._ready_process()

    def _ready_process(self) -> Process:
        """Start a process if none is alive. Raises RewardError and ProcessDiedError if that fails."""
        if self.process is None or self.process.cause_of_death is not None:
            self._drop_process()
            try:
                self.process = self._start()
            except (OSError, RuntimeError) as error:  # out of processes, threads, memory or files; maybe temporarily
                raise ProcessDiedError(f"cannot be started ({error})", crashed=False) from error
            if self._closed.is_set():  # started concurrently with `close`
                self.process.kill()
            try:
                self.process.wait_until_ready()
            except (RewardError, ProcessDiedError):
                self._drop_process()
                raise
        return self.process

    def _replace_dead(self) -> None:
        if self.process is not None and (cause := self.process.cause_of_death) is not None:
            _log.warning("scoring process %d died while idle (%s); restarting it", self.process.pid, cause)
            self._drop_process()
            self._start_idle()

    def _drop_process(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.close()


def _fault(call: Call, problem: str) -> Fault:
    trajectory, task, _ = call
    return Fault(task.id, trajectory.index, problem)
