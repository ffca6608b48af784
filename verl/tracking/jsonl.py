"""Metrics as JSON lines, and helpers for such files."""

import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from verl.host.files import replacing, unwritable
from verl.tracking.tracker import RunInfo, Tracker


class JsonlTracker(Tracker):
    """`metrics.jsonl` in the run folder, one line per step: {"step": 3, "time": seconds since 1970, name: value, ...}.

    Non-finite values are written as null, because JSON cannot represent them.
    """

    def __init__(self, run: RunInfo) -> None:
        self.path = run.folder / "metrics.jsonl"
        self._last = -1  # step of the last line

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Flushed on return: a killed process loses none. Raises DataError if writing fails."""
        append_jsonl(self.path, {"step": step, "time": round(time.time(), 3), **finite(metrics)})
        self._last = step

    def state(self) -> dict[str, Any]:
        return {"metrics_jsonl": self._last}

    def restore(self, step: int, state: Mapping[str, Any]) -> None:
        """Drop a partial last line and lines that the state lacks, such as that of a step still to be logged."""
        self._last = min(step, state.get("metrics_jsonl", step))  # missing in older checkpoints
        if self.path.exists():
            write_jsonl(self.path, [row for row in read_jsonl(self.path) if row["step"] <= self._last])


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def append_jsonl(path: Path, row: Mapping[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(_line(row))
    except OSError as error:
        raise unwritable(path, error) from error


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a file without a partial last line, left by a killed writer."""
    with path.open(encoding="utf-8", errors="replace") as file:  # the partial line may end within a character
        return [json.loads(line) for line in file if line.endswith("\n")]


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a JSON-lines file atomically. Raises DataError if writing fails."""
    # a lone surrogate cannot be encoded; its backslash escape is valid JSON
    with replacing(path) as unfinished, unfinished.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(map(_line, rows))
        file.flush()
        os.fsync(file.fileno())


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
