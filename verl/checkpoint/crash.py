"""Crash reports: a paragraph on the console, and a file with the error (its first line), tracebacks and worker logs."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from verl.checkpoint.checkpoint import CheckpointStore
from verl.checkpoint.deadline import start_shutdown_timer
from verl.errors import ConfigError, DataError, ServiceDownError
from verl.host.exits import exit_code_of
from verl.host.files import replacing
from verl.host.signals import Ended, exit_code

LOGS = "logs"
CRASH_FILES = f"{LOGS}/crash-*.txt"  # in the folder of the run, in the order of time


class _Note(str):
    """A note added by `crash_reported`; libraries and user code may add notes of their own."""

    __slots__ = ()


@contextmanager
def crash_reported(folder: Path, where: Callable[[], str] | None = None) -> Iterator[None]:
    """Add notes for the console to an error that leaves the block, and write `<folder>/logs/crash-<time>.txt`.

    where: returns the phase of the run and how to resume it
    The error starts the shutdown deadline of the command. If blocks are nested, only the innermost reports.
    """
    try:
        yield
    except Ended as ended:  # has started it where a signal came, but not where the reader of the output has gone
        start_shutdown_timer(exit_code(ended.number))
        raise
    except Exception as error:
        if not is_reported(error):
            start_shutdown_timer(exit_code_of(error), f"{type(error).__name__}: {error}")
            if where is not None:
                error.add_note(_Note(where()))
            if not isinstance(error, ConfigError | DataError | ServiceDownError):  # their message is sufficient
                error.add_note(_Note(_write_report(folder, error)))
        raise


def describe_resume(store: CheckpointStore) -> str:
    """The checkpoint from which the same command resumes, as a sentence."""
    try:
        path = store.latest()
    except DataError as error:
        return str(error)
    if path is None:
        return "No checkpoint was written yet; the same command starts from scratch"
    return f"The same command resumes from {path}"


def is_reported(error: BaseException) -> bool:
    return any(isinstance(note, _Note) for note in getattr(error, "__notes__", ()))


def _write_report(folder: Path, error: Exception) -> str:
    from verl.single_controller.ray import log_tails  # imports Ray

    path = folder / LOGS / f"crash-{time.strftime('%Y%m%d-%H%M%S')}.txt"
    (first, *_) = f"{type(error).__name__}: {error}".splitlines()
    parts = [first, f"command: {' '.join(sys.argv)}", *getattr(error, "__notes__", ())]
    parts += ["".join(traceback.format_exception(error)), log_tails(str(error))]
    try:
        with replacing(path) as unfinished:
            unfinished.write_text("\n\n".join(parts), encoding="utf-8", errors="backslashreplace")
    except DataError as problem:
        return f"Tracebacks and the workers' logs are not kept: {problem}"
    return f"Tracebacks and the ends of the workers' logs: {path}"
