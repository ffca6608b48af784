"""Ends a run that makes no progress, and describes what it waits for.

Tools, rewards and worker calls have time limits of their own, but these are timers of the event loop: code that blocks
the loop, or a wait that nothing ends, is noticed by none of them. So a thread watches for signs of progress.
"""

from __future__ import annotations

import asyncio
import contextvars
import signal
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from verl.checkpoint.deadline import start_shutdown_timer
from verl.errors import VerlError
from verl.host import daemon
from verl.host.packages import OURS, ROOT

_SIGNAL = signal.SIGRTMIN + 7  # has no other use; its handler raises in the main thread, also in a blocking call
_CHECKS = 20  # within the limit
_AGAIN_S = 5.0
_SHOWN = 5  # places that are listed
_PACKAGES = tuple(map(str, OURS))
_PATHS = sysconfig.get_paths()
_LIBRARIES = ("<frozen", *(_PATHS[name] for name in ("stdlib", "purelib", "platlib")))


class StalledError(VerlError, RuntimeError):
    """The run has made no progress for too long."""


@dataclass
class StallWatch:
    """Whether a run stands still, looked at `_CHECKS` times within the limit. A process that is stopped, or a machine
    that sleeps, is not stalled: only time between two checks counts.

    progress, moment (step and phase, for the message) and loop are called in the thread that checks.
    """

    limit_s: float
    progress: Callable[[], object]
    moment: Callable[[], str]
    loop: Callable[[], asyncio.AbstractEventLoop | None]
    _before: object = None
    _checks: int = -1  # checks in a row without progress

    @property
    def period_s(self) -> float:
        return self.limit_s / _CHECKS

    def check(self) -> str | None:
        """To be called every `period_s`. Returns what is wrong once nothing has moved for the limit."""
        now = self.progress()
        self._before, self._checks = now, self._checks + 1 if self._checks >= 0 and now == self._before else 0
        if self._checks < _CHECKS:
            return None
        where = f"{self.moment()}. Waiting: {_waits(self.loop())}"
        return f"no progress for {self.limit_s:g} s (trainer.stall_timeout_s), {where}"


class StallInterrupt(KeyboardInterrupt):
    """Leaves the event loop, which would keep any other exception in the task that it interrupts."""


@contextmanager
def ending_stalls(stalls: StallWatch) -> Iterator[None]:
    """Raises StalledError in the block if the watch finds that the run stands still.

    It is checked in another thread. Has no effect in a block that is not in the main thread, such as a notebook's.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    over, problems = threading.Event(), list[str]()

    def watch() -> None:
        while (problem := stalls.check()) is None:
            if over.wait(stalls.period_s):
                return
        problems.append(problem)
        start_shutdown_timer(1, problem)  # for a wait that no signal ends
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, _SIGNAL)
        while not over.wait(_AGAIN_S):  # a task that is not canceled yet may block like the first
            signal.pthread_kill(main, _SIGNAL)

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise StallInterrupt

    handler = signal.signal(_SIGNAL, interrupt)
    thread = threading.Thread(target=contextvars.copy_context().run, args=(watch,), name="stall", daemon=True)
    thread.start()
    try:
        yield
    except StallInterrupt as interrupt_:
        raise StalledError(problems[0]) from interrupt_
    finally:
        over.set()
        thread.join()
        signal.signal(_SIGNAL, handler)


def _waits(loop: asyncio.AbstractEventLoop | None) -> str:
    """Where the main thread, the calls in other threads and the tasks are, and which processes are stopped."""
    blocked, others = list[str](), Counter[str]()
    main = threading.main_thread().ident
    for thread, frame in sys._current_frames().items():
        frames = list(_outwards(frame))
        called = any(each.f_code.co_filename == daemon.__file__ and each.f_code.co_name == "_work" for each in frames)
        place = _place(frames)
        if thread == main and not place.startswith(_shown(daemon.__file__)):  # where the loop waits for its tasks
            blocked.append(f"the main thread in {place}")
        elif called:
            others[f"a thread in {place}"] += 1
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if process.status() == psutil.STATUS_STOPPED:
                blocked.append(f"process {process.pid} ({process.name()}), which is stopped")
    for task in asyncio.all_tasks(loop) if loop is not None else ():
        others[f"a task in {_place(_awaiting(task.get_coro()))}"] += 1
    listed = [f"{place} ({count} times)" if count > 1 else place for place, count in others.most_common(_SHOWN)]
    return "; ".join((*blocked[:_SHOWN], *listed)) or "nothing that is known"


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _awaiting(coroutine: Any) -> list[FrameType]:
    """The frames of a coroutine and of those that it awaits, from the innermost."""
    frames: list[FrameType] = []
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "ag_frame", None)
        frames += [frame] if frame is not None else []
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "ag_await", None)
    return frames[::-1]


def _place(frames: list[FrameType]) -> str:
    """The innermost place in the package or in the user's own code. frames: from the innermost"""
    for frame in frames:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGES) or not file.startswith(_LIBRARIES):
            return f"{_shown(file)}:{frame.f_lineno} ({frame.f_code.co_name})"
    return "a library"


def _shown(file: str) -> str:
    """A file of our packages relative to their folder."""
    return str(Path(file).relative_to(ROOT)) if file.startswith(_PACKAGES) else file
