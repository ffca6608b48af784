"""What a run does when its metrics show a collapse: trainer.on_collapse."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from verl.checkpoint.checkpoint import CheckpointStore
from verl.errors import VerlError
from verl.tracking.jsonl import append_jsonl, finite, read_jsonl, write_jsonl
from verl.trainer.hooks import MAX_ROLLBACKS, NoWatch, Watch

_log = logging.getLogger(__name__)


class CollapseError(VerlError, RuntimeError):
    """The run has collapsed and must not continue."""


@dataclass(kw_only=True)
class CollapsePolicy:
    """Warns, names the checkpoint to roll back to, or stops the run."""

    action: str  # warn, stop or rollback
    store: CheckpointStore
    file: Path  # one JSON object per collapse
    watch: Watch = field(default_factory=NoWatch)
    rollbacks: int = 0

    @property
    def may_save(self) -> bool:
        """Whether to save now: while a collapse rule is triggered, a run that may roll back must not."""
        return self.action == "warn" or not self.watch.triggered

    def checkpoint_to_load(self, step: int, alarms: Sequence[object], metrics: Mapping[str, float]) -> Path | None:
        """Record the alarms of a step. Returns the checkpoint to roll back to; None: the run continues.

        Raises CollapseError if the run must stop.
        """
        message = "\n".join(str(alarm) for alarm in alarms)
        action = self.action
        path = None if action == "warn" else self.store.latest(hashes=True)
        if action == "rollback" and (path is None or self.rollbacks == MAX_ROLLBACKS):
            action = "stop"
        back_to = path.name if path is not None and action == "rollback" else None
        report = {"step": step, "action": action, "alarms": message.splitlines(), "back_to": back_to}
        append_jsonl(self.file, {**report, "metrics": finite(metrics)})
        if action == "warn":
            _log.warning("%s", message)
            return None
        if path is None or action == "stop":
            tried = f" after {self.rollbacks} rollbacks" if self.rollbacks else ""
            rest = "there is no checkpoint yet" if path is None else f"the last good checkpoint is {path}"
            raise CollapseError(f"the run has collapsed{tried}. {message}\nStopped after step {step}; {rest}")
        self.rollbacks += 1
        count = f"{self.rollbacks} of at most {MAX_ROLLBACKS}"
        _log.warning("%s\nRolled back to %s, continuing with other prompts (rollback %s)", message, path, count)
        return path

    def truncate_after(self, step: int) -> None:
        """Drop the collapses of later steps; a step that was reverted for one remains."""
        if self.file.exists():
            rows = read_jsonl(self.file)
            write_jsonl(self.file, [row for row in rows if row["step"] <= step or row.get("action") != "warn"])
