"""What a checkpoint of a run holds, and what a run drops when it returns to one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.checkpoint.checkpoint import CheckpointStore
from verl.checkpoint.state import Saved
from verl.data.overlap import TRAIN_TASKS, TrainTasks
from verl.errors import DataError
from verl.host.files import remove_unfinished
from verl.single_controller.group import WorkerGroup
from verl.tracking.tracker import Trackers
from verl.tracking.transcripts import Transcripts
from verl.trainer.callbacks import Callbacks
from verl.trainer.collapse_policy import CollapsePolicy
from verl.trainer.hooks import MODEL_FILES, Recorder
from verl.trainer.ppo import PPOTrainer
from verl.workers.rank import TrainingRank


@dataclass
class Validated:
    """The metrics of the first validation and of the last one."""

    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    unlogged: Mapping[str, float] | None = None  # metrics of a step that a resumed run has to validate first


@dataclass(kw_only=True)
class Checkpointing:
    """Saves the ranks and the state of every part of the controller, and restores them."""

    store: CheckpointStore
    folder: Path  # run folder
    header: Mapping[str, Any]  # command, settings that must not change on resume, contents of what they name, rewards
    saved: Saved | None = None  # checkpoint to resume from
    train_tasks: TrainTasks = field(default_factory=TrainTasks)  # written into every exported model
    workers: WorkerGroup  # TrainingRanks
    trainer: PPOTrainer
    trackers: Trackers
    collapse: CollapsePolicy
    callbacks: Callbacks
    transcripts: Transcripts
    recorder: Recorder | None  # None: not installed
    validated: Validated = field(default_factory=Validated)
    snapshot: dict[str, Any] = field(default_factory=dict)  # state after the last complete step, with save_on_signal

    def state(self, unlogged: Mapping[str, float] | None = None) -> dict[str, Any]:
        """The controller's state, as plain JSON. unlogged: metrics of the step, if its validation is still to come"""
        return {
            **self.header,
            "trainer": self.trainer.state(),
            "trackers": self.trackers.state(),
            "watch": self.collapse.watch.state(),
            "callbacks": self.callbacks.state(),
            "before": self.validated.before,
            "after": self.validated.after,
            "unlogged": None if unlogged is None else dict(unlogged),
        }

    def take_snapshot(self, unlogged: Mapping[str, float] | None = None) -> None:
        """Copy the state between two steps: the next step draws tasks before it is complete."""
        self.snapshot = json.loads(json.dumps(self.state(unlogged)))

    def save(self, step: int, score: float | None, state: Mapping[str, Any], staged: Callable[[], object]) -> Path:
        """See `save_checkpoint`. Returns the checkpoint's folder."""
        return save_checkpoint(self.store, step, score, self.workers, self.train_tasks, state, staged)

    def resume(self) -> Path | None:
        """Load the saved checkpoint, if there is one."""
        remove_unfinished(self.folder)
        if self.saved is None:
            self._truncate_after(-1, {})
            return None
        self.load(self.saved)
        return self.saved.path

    def load(self, saved: Saved) -> None:
        """Restore the state of the checkpoint, except for the position in the task stream."""
        state = saved.state
        self.workers.call(TrainingRank.load, saved.path)
        self.trainer.restore(state["trainer"])
        self.collapse.watch.restore(state["watch"])
        if "callbacks" in state:  # missing in older checkpoints
            self.callbacks.restore(state["callbacks"])
        self._truncate_after(self.trainer.step, state["trackers"])
        self.validated.before, self.validated.after = state["before"], state["after"]
        self.validated.unlogged = state.get("unlogged")  # missing in older checkpoints

    def _truncate_after(self, step: int, trackers: dict[str, Any]) -> None:
        """Drop what later steps have written. trackers: their state at this step"""
        self.trackers.restore(step, trackers)
        writers = (self.collapse, self.transcripts, self.trainer.keeper, self.recorder)
        for writer in writers:
            if writer is not None:
                writer.truncate_after(step)


def save_checkpoint(
    store: CheckpointStore,
    step: int,
    score: float | None,
    workers: WorkerGroup,
    train_tasks: TrainTasks,
    state: Mapping[str, Any],
    staged: Callable[[], object],
) -> Path:
    """Write the ranks' files, the exported model's list of training tasks and the controller's state.

    workers: TrainingRanks; score: larger is better, None: not validated
    staged: called once the ranks hold copies of what is to be written, so that training may go on
    Returns the checkpoint's folder. Raises DataError if the ranks' files are not visible on this node.
    """
    with store.writing(step, score) as unfinished:
        workers.call(TrainingRank.stage, unfinished.folder)
        staged()
        workers.call_beside(TrainingRank.write)
        for part in ("actor/.metadata", "hf/config.json"):
            if not (unfinished.folder / part).is_file():
                raise DataError(
                    f"{part} not found: the ranks write to a file system that this node cannot see",
                    hint="Set trainer.default_local_dir to a folder that all nodes share",
                    file=str(unfinished.folder),
                )
        train_tasks.write(unfinished.folder / "hf" / TRAIN_TASKS)
        if (write_model_files := MODEL_FILES.find()) is not None:
            write_model_files(unfinished.folder / "hf", state, user_code=True)
        unfinished.write_state(state)
    latest = store.latest()
    assert latest is not None
    return latest
