"""Breaking off code that takes too long and cannot be asked to end: a timer whose signal raises inside of it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

REAL, PROCESSOR = signal.ITIMER_REAL, signal.ITIMER_PROF  # seconds of the wall clock, or of this process's work
_SIGNALS = {REAL: signal.SIGALRM, PROCESSOR: signal.SIGPROF}
_CLOCKS: dict[int, Callable[[], float]] = {REAL: time.monotonic, PROCESSOR: time.process_time}
_AT_ONCE_S = 1e-6


@contextmanager
def raising_after(
    seconds: float, error: Callable[[], BaseException], timer: int = REAL, again_s: float = 0.0
) -> Iterator[None]:
    """Raises the error inside of the block. In the main thread alone, where a signal can break off a loop.

    A timer that was set before waits meanwhile: it goes off after what it had left, at the block's end where that is
    over by then.

    again_s: after which it is raised again, for code that swallows what interrupts it; 0: never
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise error()

    clock = _CLOCKS[timer]
    handler = signal.signal(_SIGNALS[timer], interrupt)
    began = clock()
    left_s, interval_s = signal.setitimer(timer, seconds, again_s)
    try:
        yield
    finally:
        signal.setitimer(timer, 0.0)
        signal.signal(_SIGNALS[timer], handler)
        if left_s:
            signal.setitimer(timer, max(_AT_ONCE_S, left_s - (clock() - began)), interval_s)
