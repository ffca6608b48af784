"""What two runs have to have in common if nothing was lost: their metrics without times, and their weights."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from verl.tracking.jsonl import read_jsonl

_TIMED = re.compile(r"time|perf/|memory/|tools/\w+/seconds")
_COUNTS = ("rollout/engine_restarts", "rollout/requests_retried")  # of what was healed


def metrics(out: Path) -> list[dict[str, Any]]:
    """Rows of metrics, without what depends on the machine's speed and counts of what was healed."""
    rows = read_jsonl(out / "run" / "metrics.jsonl")
    return [{key: value for key, value in row.items() if not _TIMED.match(key) and key not in _COUNTS} for row in rows]


def newest(out: Path) -> int:
    """The step of the newest checkpoint, 0 if there is none."""
    pointer = out / "run" / "checkpoints" / "latest.json"
    return int(json.loads(pointer.read_text())["step"]) if pointer.exists() else 0


def weights(out: Path) -> str:
    """A hash of those in the newest checkpoint."""
    file = out / "run" / "checkpoints" / f"step-{newest(out):06d}" / "hf" / "model.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest()
