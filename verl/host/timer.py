"""Timeouts for code that does not cooperate: a signal raises an exception inside it, or in a thread the interpreter."""

import ctypes
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import FrameType

REAL, PROCESSOR = signal.ITIMER_REAL, signal.ITIMER_PROF  # wall-clock time, or CPU time of this process
_SIGNALS = {REAL: signal.SIGALRM, PROCESSOR: signal.SIGPROF}
_CLOCKS: dict[int, Callable[[], float]] = {REAL: time.monotonic, PROCESSOR: time.process_time}
_AT_ONCE_S = 1e-6


@contextmanager
def raising_after(
    seconds: float, error: Callable[[], BaseException], timer: int = REAL, again_s: float = 0.0
) -> Iterator[None]:
    """Raises the error inside the block after `seconds`. In a thread, which has no signals, only in real time.

    A timer that was set before is suspended and restored with its remaining time; if that has passed, it fires at the
    end of the block.

    again_s: interval for raising it again, for code that swallows the exception; 0: never
    """
    if threading.current_thread() is not threading.main_thread():
        with _raising_in_thread(seconds, error, again_s) if timer == REAL else nullcontext():
            yield
        return

    # False before this timer is set, too: a signal of an earlier one may arrive late, by way of another thread.
    armed = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        if armed:
            raise error()

    clock = _CLOCKS[timer]
    began = clock()
    left_s, interval_s = signal.setitimer(timer, 0.0)
    handler = signal.signal(_SIGNALS[timer], interrupt)
    try:
        armed = True
        signal.setitimer(timer, seconds, again_s)
        yield
    finally:
        # First, and without a call: handlers run between calls, and one that raises would leave the timer set.
        armed = False
        signal.setitimer(timer, 0.0)
        signal.signal(_SIGNALS[timer], handler)
        if left_s:
            signal.setitimer(timer, max(_AT_ONCE_S, left_s - (clock() - began)), interval_s)


class _LateError(BaseException):
    """What the interpreter raises in a thread: a class, without arguments."""


@contextmanager
def _raising_in_thread(seconds: float, error: Callable[[], BaseException], again_s: float) -> Iterator[None]:
    """It may be raised between any two steps, also here: the thread that raises it ends before the block does."""
    target, stop = ctypes.c_ulong(threading.get_ident()), threading.Lock()
    leaving = False
    stop.acquire()

    def interrupt() -> None:
        wait_s = seconds
        while not stop.acquire(timeout=wait_s) and not leaving:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(target, ctypes.py_object(_LateError))
            if not (wait_s := again_s):
                return

    def end() -> None:
        while watch.is_alive():
            with suppress(_LateError):
                if stop.locked():
                    stop.release()
                watch.join()
        ctypes.pythonapi.PyThreadState_SetAsyncExc(target, None)  # one that is not raised yet

    watch = threading.Thread(target=interrupt, name="deadline", daemon=True)
    try:
        try:
            watch.start()
            yield
        finally:
            leaving = True
            end()
    except _LateError:
        raise error() from None
