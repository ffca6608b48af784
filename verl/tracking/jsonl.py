"""Metrics as JSON lines, and the two ways in which this package writes such files: a line at a time, or whole."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from verl.files import replacing, unwritable
from verl.tracking.tracker import Run, Tracker


class JsonlTracker(Tracker):
    """`metrics.jsonl` in the run folder, one line a step: {"step": 3, "time": seconds since 1970, name: value, ...}.

    A value that is no finite number is null, because JSON has no other word for it.
    """

    def __init__(self, run: Run) -> None:
        self.path = run.folder / "metrics.jsonl"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds a line, which is in the system's hands when this returns: a killed process loses none.

        Raises DataError when it cannot be written.
        """
        append_row(self.path, {"step": step, "time": round(time.time(), 3), **finite(metrics)})

    def restore(self, step: int, state: Mapping[str, Any]) -> None:
        """Drops the lines beyond `step`, and one that a kill has torn; the file is replaced as a whole."""
        if self.path.exists():
            write_rows(self.path, [row for row in read_rows(self.path) if row["step"] <= step])


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """The metrics as JSON can say them."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """One more line; raises DataError when it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(_line(row))
    except OSError as error:
        raise unwritable(path, error) from error


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; a last line without its end is left out, for its writer was killed."""
    with path.open(encoding="utf-8", errors="replace") as file:  # the tear may go through a character
        return [json.loads(line) for line in file if line.endswith("\n")]


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """A JSON-lines file that appears whole or not at all. Raises DataError when it cannot be written."""
    # half a surrogate pair cannot be encoded; the escape that stands for it is JSON's own
    with replacing(path) as unfinished, unfinished.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(map(_line, rows))
        file.flush()
        os.fsync(file.fileno())


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
