"""The standard streams of a command: files that may be on a full disk, and pipes whose reader may go."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TextIO, cast

from verl.errors import DataError
from verl.host.exits import exit_code_of, write_error
from verl.host.files import FULL, unwritable


class _Checked:
    """A stream whose writes are checked."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._checked():
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        with self._checked():
            self._stream.writelines(lines)

    def flush(self) -> None:
        with self._checked():
            self._stream.flush()

    def _checked(self) -> AbstractContextManager[None, bool | None]:
        raise NotImplementedError

    def _discard(self) -> None:
        """What is buffered would fail again when Python ends."""
        discarding = os.open(os.devnull, os.O_WRONLY)
        os.dup2(discarding, self._stream.fileno())
        os.close(discarding)


class Output(_Checked):
    """Standard output. A full disk is a DataError with the path, from then on; so is a stream that the caller closed.

    A reader that has gone (`| head`) ends the command as SIGPIPE would: without a word, with exit code 141. What other
    threads write is then lost, and the next line of the main thread raises Ended.
    error: that DataError, to be reported in another place
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.error: DataError | None = None

    @contextmanager
    def _checked(self) -> Iterator[None]:
        if self.error is not None:
            raise self.error
        try:
            yield
        except BrokenPipeError:
            from verl.host.signals import Ended  # imports asyncio, which small commands do without

            if threading.current_thread() is threading.main_thread():
                self._discard()
                raise Ended(signal.SIGPIPE) from None
        except OSError as error:
            if error.errno not in (*FULL, errno.EBADF):
                raise
            self.error = unwritable(self._place(error), error)
            self._discard()
            raise self.error from error

    def _place(self, error: OSError) -> Path:
        try:
            if error.errno in FULL:
                return Path(f"/proc/self/fd/{self._stream.fileno()}").readlink()
        except OSError:
            pass
        return Path("standard output")


class Messages(_Checked):
    """Standard error. A message that cannot be written there has no other place; the exit code remains."""

    @contextmanager
    def _checked(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self._discard()


@contextmanager
def checked_streams() -> Iterator[None]:
    """Checks both standard streams of a command, and flushes its output in the end. Raises SystemExit.

    A command that ended well, but whose output cannot be written, ends with a line and exit code 2.
    """
    sys.stdout = sys.stdout or _closed(1, os.O_RDONLY)
    sys.stderr = sys.stderr or _closed(2, os.O_WRONLY)
    before = sys.stdout, sys.stderr
    output = Output(sys.stdout)
    sys.stdout, sys.stderr = cast(TextIO, output), cast(TextIO, Messages(sys.stderr))
    try:
        with _interruptible():
            try:
                yield
            except SystemExit as end:
                _finish(output, end.code)
                raise
            except DataError as error:
                if error is not output.error:
                    raise
                raise SystemExit(write_error(error)) from error
            _finish(output, 0)
    finally:
        sys.stdout, sys.stderr = before


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C while a command imports its packages, or in one without handlers of its own."""
    try:
        yield
    except KeyboardInterrupt as error:
        number: int = getattr(error, "number", signal.SIGINT)  # of Ended
        if number != signal.SIGPIPE:
            sys.stderr.write("interrupted\n")
        raise SystemExit(128 + number) from None


def _finish(output: Output, code: object) -> None:
    reported = output.error is not None
    try:
        output.flush()
    except DataError as error:
        if not (reported and code):
            write_error(error)
        if not code:
            raise SystemExit(exit_code_of(error)) from error


def _closed(number: int, access: int) -> TextIO:
    """In place of a stream that the caller has closed, whose descriptor another file would get. Children inherit it.

    access: reading, so that a write fails as on what is closed
    """
    while (descriptor := os.open(os.devnull, access)) < number:
        pass
    os.set_inheritable(descriptor, True)
    return open(descriptor, "w", encoding="utf-8", closefd=False)
