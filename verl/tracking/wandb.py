"""Metrics to Weights & Biases; the package is imported only if this tracker is used."""

import importlib
import uuid
from collections.abc import Mapping
from typing import Any

from verl.errors import ConfigError
from verl.tracking.tracker import Run, Tracker

_STATE = "wandb_run_id"


class WandbTracker(Tracker):
    """One W&B run across all resumes: its id is in `wandb_run_id.txt` in the run folder and in checkpoints.

    The x axis is our own step, so that a resumed run may log steps again; W&B keeps both passes over them.
    """

    def __init__(self, run: Run) -> None:
        try:
            self._wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise ConfigError("trainer.logger names wandb, which is not installed: pip install wandb") from error
        self._run = run
        self._file = run.folder / f"{_STATE}.txt"
        self._id = self._file.read_text(encoding="utf-8").strip() if self._file.exists() else uuid.uuid4().hex[:8]
        self._session: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._session is None:
            self._session = self._open()
        self._session.log({"step": step, **metrics})

    def close(self) -> None:
        if self._session is not None:
            self._session.finish()
        self._session = None

    def state(self) -> dict[str, Any]:
        return {_STATE: self._id}

    def restore(self, step: int, state: Mapping[str, Any]) -> None:
        """Of the checkpoint; starting over (-1) opens a new run, a rollback keeps the current one."""
        if self._session is not None:
            return
        if _STATE in state:
            self._id = state[_STATE]
        elif step < 0:
            self._id = uuid.uuid4().hex[:8]

    def _open(self) -> Any:
        run = self._run
        run.folder.mkdir(parents=True, exist_ok=True)
        self._file.write_text(self._id + "\n", encoding="utf-8")
        session = self._wandb.init(
            project=run.project,
            name=run.name,
            id=self._id,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
        )
        session.define_metric("step")
        session.define_metric("*", step_metric="step")
        return session
