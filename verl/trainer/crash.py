"""What is left of a run that failed: a paragraph for the console, and a file with everything else."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from verl.errors import ConfigError, DataError, ServiceDownError
from verl.trainer.checkpoint import CheckpointStore
from verl.trainer.deadline import begin_end

LOGS = "logs"


class _Note(str):
    """One of `crash_reported`. Libraries and users' code may give errors notes of their own."""

    __slots__ = ()


@contextmanager
def crash_reported(folder: Path, where: Callable[[], str] | None = None) -> Iterator[None]:
    """Give an error that leaves the block notes for the console, and write `<folder>/logs/crash-<time>.txt`.

    where: what the run was doing, and where it can go on
    From the error on, the command that runs here has to end within a time. Of nested blocks the innermost reports.
    """
    try:
        yield
    except Exception as error:
        if not is_reported(error):
            begin_end(exit_code_of(error), f"{type(error).__name__}: {error}")
            if where is not None:
                error.add_note(_Note(where()))
            if not isinstance(error, ConfigError | DataError | ServiceDownError):  # whose message says it all
                error.add_note(_Note(_written(folder, error)))
        raise


def goes_on_from(store: CheckpointStore) -> str:
    """Where the same command takes a run up again."""
    try:
        path = store.latest()
    except DataError as error:
        return str(error)
    if path is None:
        return "No checkpoint was written yet; the same command starts anew"
    return f"The same command goes on from {path}"


def is_reported(error: BaseException) -> bool:
    """Whether an error has been through `crash_reported`."""
    return any(isinstance(note, _Note) for note in getattr(error, "__notes__", ()))


def exit_code_of(error: BaseException) -> int:
    """2 for what the user has to mend first, 1 for a run that failed."""
    return 2 if isinstance(error, ConfigError | DataError) else 1


def _written(folder: Path, error: Exception) -> str:
    from verl.single_controller.ray import last_words  # imports Ray

    path = folder / LOGS / f"crash-{time.strftime('%Y%m%d-%H%M%S')}.txt"
    parts = [
        f"command: {' '.join(sys.argv)}",
        *getattr(error, "__notes__", ()),
        "".join(traceback.format_exception(error)),
        last_words(str(error)),
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n\n".join(parts), encoding="utf-8", errors="backslashreplace")
    except OSError as problem:
        return f"Tracebacks and the workers' logs could not be written to {path} ({problem.strerror})"
    return f"Tracebacks and the workers' last words: {path}"
