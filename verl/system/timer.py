"""Timeouts for code that does not cooperate: a timer signal raises an exception inside it."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

REAL, PROCESSOR = signal.ITIMER_REAL, signal.ITIMER_PROF  # wall-clock time, or CPU time of this process
_SIGNALS = {REAL: signal.SIGALRM, PROCESSOR: signal.SIGPROF}
_CLOCKS: dict[int, Callable[[], float]] = {REAL: time.monotonic, PROCESSOR: time.process_time}
_AT_ONCE_S = 1e-6


@contextmanager
def raising_after(
    seconds: float, error: Callable[[], BaseException], timer: int = REAL, again_s: float = 0.0
) -> Iterator[None]:
    """Raises the error inside the block after `seconds`; only in the main thread, where a signal can interrupt a loop.

    A timer that was set before is suspended and restored with its remaining time; if that has passed, it fires at the
    end of the block.

    again_s: interval for raising it again, for code that swallows the exception; 0: never
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    leaving = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not leaving:
            raise error()

    clock = _CLOCKS[timer]
    handler = signal.signal(_SIGNALS[timer], interrupt)
    began = clock()
    left_s, interval_s = signal.getitimer(timer)
    try:
        signal.setitimer(timer, seconds, again_s)
        yield
    finally:
        # First, and without a call: handlers run between calls, and one that raises would leave the timer set.
        leaving = True
        signal.setitimer(timer, 0.0)
        signal.signal(_SIGNALS[timer], handler)
        if left_s:
            signal.setitimer(timer, max(_AT_ONCE_S, left_s - (clock() - began)), interval_s)
