"""Signals that end a command: Ctrl-C, SIGTERM (schedulers) and SIGHUP (a terminal that is gone).

    with ending_on_signals(announce):    # the first signal raises Ended, wherever the main thread is
        with kept_signals():             # around a library that installs handlers of its own
            ...
        with stop.listening(loop):       # inside, the first signal only asks; the one after it raises Ended
            ...

Handlers can be set in the main thread alone; elsewhere, as in a notebook's worker, all of this does nothing.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

# Ctrl-C is not among those that wait: whoever starts processes keeps it from them by their process groups
_OF_SCHEDULERS = (signal.SIGTERM, signal.SIGHUP)
_ENDING = (signal.SIGINT, *_OF_SCHEDULERS)


class Ended(KeyboardInterrupt):
    """A signal ends the command.

    number: of the signal
    note: what became of the work
    """

    def __init__(self, number: int, note: str = "") -> None:
        super().__init__(number, note)
        self.number, self.note = number, note


def exit_code(number: int) -> int:
    """Of a command that a signal has ended, as shells count."""
    return 128 + number


@contextmanager
def ending_on_signals(announce: Callable[[int], None]) -> Iterator[None]:
    """The first signal is announced and raises Ended; a second one raises it again, wherever the tidying up is.

    Signals that whoever started this wants ignored (nohup, background jobs) or has a handler for stay as they are.
    asyncio's own handler of Ctrl-C would not act before its loop runs again, and it does not while workers are
    waited for.
    """
    ours = [number for number in _ENDING if _is_default(number)]
    first: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        if not first:
            first.append(number)
            _announced(announce, number)
        raise Ended(first[0])

    with _handled(ours, end):
        yield


@contextmanager
def kept_signals() -> Iterator[None]:
    """For the start and the end of a library that takes SIGTERM for itself, as Ray does.

    Signals of schedulers wait meanwhile and handlers are put back. Processes that are started inside do not get them:
    a signal to a whole process group or container is for this process, which ends what it started in order.

    The mask is for these processes. Here another thread may get the signal, and the handler then runs in the main
    thread all the same. So it only notes the signal, which is given again after the block. A handler of the library's
    that leaves the block by `sys.exit(number)`, as Ray's does, counts as such a note.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    def give_again() -> None:
        for number in set(came):
            signal.raise_signal(number)

    with ExitStack() as after:  # every step of it, also where a signal raises meanwhile
        after.callback(give_again)
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
    """A signal that asks for an end as soon as the state is whole."""

    def __init__(self) -> None:
        self.number: int | None = None  # of the signal
        self._wake: list[Callable[[], object]] = []

    @contextmanager
    def listening(self, announce: Callable[[int], None]) -> Iterator[None]:
        """Note the first signal instead of ending; from then on signals do again what they did before."""
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
        """Until a stop is asked for."""
        loop, asked = asyncio.get_running_loop(), asyncio.Event()
        wake = lambda: loop.call_soon_threadsafe(asked.set)  # noqa: E731  wakes a loop that waits for nothing else
        self._wake.append(wake)
        try:
            if self.number is None:
                await asked.wait()
        finally:
            self._wake.remove(wake)


def _is_default(number: int) -> bool:
    return signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)


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
    """A terminal that is gone fails everybody who writes to it from now on, unless it is let go."""
    try:
        announce(number)
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (1, 2):
            os.dup2(nowhere, stream)
        os.close(nowhere)
