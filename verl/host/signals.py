"""Signals that end a command: Ctrl-C, SIGTERM (schedulers) and SIGHUP (a terminal that is gone).

    with ending_on_signals(announce):    # the first signal raises Ended in the main thread
        with kept_signals():             # around a library that installs its own handlers
            ...
        with stop.listening(loop):       # the first signal only requests a stop; the next one raises Ended
            ...

Handlers can be set only in the main thread; in other threads, e.g. in a notebook, this module has no effect.
"""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

# Ctrl-C is not deferred: child processes are shielded from it by their own process groups
_OF_SCHEDULERS = (signal.SIGTERM, signal.SIGHUP)
_ENDING = (signal.SIGINT, *_OF_SCHEDULERS)
_AGAIN_S = 0.05


class Ended(KeyboardInterrupt):
    """A signal (`number`) ends the command; SIGPIPE: the reader of its output has gone (verl/host/output.py).

    note: state of the saved work, for the message
    """

    def __init__(self, number: int, note: str = "") -> None:
        super().__init__(number, note)
        self.number, self.note = number, note


def exit_code(number: int) -> int:
    return 128 + number


@contextmanager
def ending_on_signals(announce: Callable[[int], None]) -> Iterator[None]:
    """The first signal is announced and raises Ended; a second one raises it again, also during cleanup.

    Signals that are ignored (nohup, background jobs) or already have a handler are left alone. asyncio's own handler
    acts only when its loop runs again, which it does not while it waits for workers.
    """
    defaults = (signal.SIG_DFL, signal.default_int_handler)
    ours = [number for number in _ENDING if signal.getsignal(number) in defaults]
    first: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        if not first:
            first.append(number)
            _announced(announce, number)
        raise Ended(first[0])

    with _handled(ours, end), _raised_until_seen():
        yield


@contextmanager
def kept_signals() -> Iterator[None]:
    """Use around start and shutdown of a library that installs its own SIGTERM handler, as Ray does.

    Scheduler signals are deferred and handlers are restored. Processes started inside the block do not receive them: a
    signal to a whole process group or container is handled by this process, which shuts its children down in order.

    The signal mask is for these processes. In this process another thread may receive the signal, and the handler still
    runs in the main thread; so it only records the signal, which is raised again after the block. A handler of the
    library that leaves the block with `sys.exit(number)`, as Ray's does, counts as a recorded signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    def raise_again() -> None:
        for number in set(came):
            signal.raise_signal(number)

    with ExitStack() as after:  # runs all callbacks, even if a signal handler raises in between
        after.callback(raise_again)
        after.callback(signal.pthread_sigmask, signal.SIG_SETMASK, signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        signal.pthread_sigmask(signal.SIG_BLOCK, _OF_SCHEDULERS)
        for number in _OF_SCHEDULERS:
            handler = signal.getsignal(number)
            after.callback(signal.signal, number, handler)
            if handler != signal.SIG_IGN:
                signal.signal(number, note)
        try:
            try:
                yield
            finally:
                for number in _OF_SCHEDULERS:
                    signal.signal(number, note)
        except SystemExit as end:
            came += [number for number in _OF_SCHEDULERS if number == end.code]
            raise


class StopRequest:
    """A request, by signal, to stop at the next consistent state."""

    def __init__(self) -> None:
        self.number: int | None = None  # signal number
        self._wake: list[Callable[[], object]] = []

    @contextmanager
    def listening(self, announce: Callable[[int], None]) -> Iterator[None]:
        """Record the first signal; afterwards the previous handlers are active again."""
        found = {number: signal.getsignal(number) for number in _ENDING}
        before = {number: handler for number, handler in found.items() if handler not in (None, signal.SIG_IGN)}

        def note(number: int, frame: FrameType | None) -> None:
            self.number = number
            for each, handler in before.items():
                signal.signal(each, handler)
            _announced(announce, number)
            for wake in self._wake:
                wake()

        with _handled(list(before), note):
            yield

    async def wait(self) -> None:
        loop, requested = asyncio.get_running_loop(), asyncio.Event()
        wake = lambda: loop.call_soon_threadsafe(requested.set)  # noqa: E731  wakes an idle loop
        self._wake.append(wake)
        try:
            if self.number is None:
                await requested.wait()
        finally:
            self._wake.remove(wake)


@contextmanager
def _raised_until_seen() -> Iterator[None]:
    """Python discards an exception in `__del__`, in a callback of a weak reference and in C code that cannot fail.

    The signal then comes again. Only the closing of a file that is not referenced any more discards it unnoticed.
    """
    before = sys.unraisablehook

    def discarded(unraisable: "sys.UnraisableHookArgs") -> None:
        if isinstance(unraisable.exc_value, Ended):
            threading.Timer(_AGAIN_S, os.kill, (os.getpid(), unraisable.exc_value.number)).start()
        else:
            before(unraisable)

    sys.unraisablehook = discarded
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextmanager
def _handled(numbers: list[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, each in before.items():
            signal.signal(number, each)


def _announced(announce: Callable[[int], None], number: int) -> None:
    """If the terminal or the reader of the output is gone, redirect output to /dev/null: later writes do not fail."""
    try:
        try:
            announce(number)
            sys.stdout.flush()
        except RuntimeError as error:  # a signal in the middle of a print, which then writes both texts
            if "reentrant" not in str(error):
                raise
            os.write(1, b"")  # fails if the terminal is gone, too
    except (OSError, Ended) as error:
        if isinstance(error, Ended) and error.number != signal.SIGPIPE:  # a second signal
            raise
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (1, 2):
            os.dup2(nowhere, stream)
        os.close(nowhere)
