"""A run from its first step to its last: train, validate, save, tell.

What takes long and is nobody's turn to wait for (saving, recording) is done in a thread: rollouts may be in flight, and
the seconds of their tools would run on while the event loop stood still.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from verl.daemon import in_daemon
from verl.errors import DataError
from verl.evaluation.overlap import TRAIN_TASKS, TrainTasks
from verl.single_controller.group import WorkerGroup
from verl.tracking.console import Display
from verl.tracking.jsonl import append_row, finite
from verl.tracking.tracker import Trackers
from verl.tracking.transcripts import Transcripts
from verl.trainer.checkpoint import CheckpointStore, read_state
from verl.trainer.collapse import MAX_ROLLBACKS, Alarm, CollapseError, CollapseWatch
from verl.trainer.exams import Exams
from verl.trainer.ppo import PPOTrainer
from verl.trainer.record import Recorder, truncate_after
from verl.trainer.state import Saved
from verl.trainer.validate import Validator
from verl.workers.rank import TrainingRank

_log = logging.getLogger(__name__)
_GIB = 2**30
COMMAND = "main_ppo"


@dataclass(frozen=True, slots=True)
class FitSettings:
    """How long, and how often what."""

    total_steps: int
    test_freq: int = 0  # 0: only before and after
    save_freq: int = 0  # 0: only at the end
    val_before_train: bool = True
    on_collapse: str = "warn"  # stop | rollback


@dataclass
class Fit:
    """The loop around the training step. Validations before and after are kept for the table at the end."""

    settings: FitSettings
    trainer: PPOTrainer
    validator: Validator
    exams: Exams
    workers: WorkerGroup  # of TrainingRanks
    store: CheckpointStore
    trackers: Trackers
    transcripts: Transcripts
    display: Display
    made_with: Mapping[str, Any]  # settings that a resumed run must share
    folder: Path  # the run's
    saved: Saved | None = None  # where to go on
    watch: CollapseWatch = field(default_factory=CollapseWatch)
    recorder: Recorder | None = None
    train_tasks: TrainTasks = field(default_factory=TrainTasks)  # written into every exported model
    rollbacks: int = 0
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)  # of every memory metric

    async def run(self) -> Path:
        """Train all steps that are left. Returns the last checkpoint's folder."""
        try:
            return await self._run()
        finally:
            await self.trainer.rollouts.close()
            await self.exams.close()

    async def _run(self) -> Path:
        last = self._resume()
        if self.trainer.step >= self.settings.total_steps:
            assert last is not None
            _log.warning("%s has all %d steps already: nothing is left to train", last, self.settings.total_steps)
            return last
        async with self.trainer.publisher.ranks:
            await self._publish()
        if self.trainer.step == 0 and self.settings.val_before_train and (self.validator.sets or self.exams.exams):
            self.before = await self._validate()
            self.trackers.log(0, self.before)
        owed = False  # a checkpoint that fell due while a sign of a collapse held
        while self.trainer.step < self.settings.total_steps:
            metrics = await self.trainer.train_step()
            step, done = self.trainer.step, self.trainer.step == self.settings.total_steps
            self.transcripts.write(step, self.trainer.groups)
            if self.recorder is not None:
                await in_daemon(self.recorder.write, step, self.trainer.lesson, metrics)
            alarms = self.watch.observe(step, metrics)
            metrics |= {"collapse/signs": float(len(self.watch.held)), **self._memory()}
            if alarms and await self._went_back(alarms, metrics):
                owed = False
                continue
            tested = done or _due(step, self.settings.test_freq)
            if tested:
                self.after = await self._validate()
                metrics |= self.after
            self.trackers.log(step, metrics)
            owed = owed or done or _due(step, self.settings.save_freq)
            if owed and (done or self.settings.on_collapse == "warn" or not self.watch.held):
                async with self.trainer.publisher.ranks:
                    last, owed = await in_daemon(self._save, self._score() if tested else None), False
        assert last is not None
        return last

    async def _went_back(self, alarms: Sequence[Alarm], metrics: Mapping[str, float]) -> bool:
        """Do what trainer.on_collapse says; whether the run stands at an earlier step now.

        Raises CollapseError if the run is not to go on.
        """
        said = "\n".join(str(alarm) for alarm in alarms)
        if self.settings.on_collapse == "warn":
            _log.warning("%s", said)
            return False
        step, path = self.trainer.step, self.store.latest(hashes=True)
        retry = path is not None and self.settings.on_collapse == "rollback" and self.rollbacks < MAX_ROLLBACKS
        report = {"step": step, "alarms": said.splitlines(), "back_to": path.name if path and retry else None}
        append_row(self.folder / "collapses.jsonl", {**report, "metrics": finite(metrics)})
        if path is None or not retry:
            self.trackers.log(step, metrics)
            tried = f"; it was taken back {self.rollbacks} times before" if self.rollbacks else ""
            rest = "there is no checkpoint yet" if path is None else f"the last good checkpoint is {path}"
            raise CollapseError(f"the run has collapsed{tried}. {said}\nStopped after step {step}; {rest}")
        self.rollbacks += 1
        _log.warning("%s\nBack to %s, with other prompts (%d of %d times)", said, path, self.rollbacks, MAX_ROLLBACKS)
        await self.trainer.rollouts.begin_again()
        state = read_state(path)
        then, now = state["trainer"]["rollouts"], self.trainer.rollouts.state()
        state["trainer"]["rollouts"] = {**now, "shaping": then["shaping"]}  # no prompt is drawn again, none is lost
        async with self.trainer.publisher.ranks:
            self._take_up(Saved(path, state))
            await self._publish()
        return True

    async def _publish(self) -> None:
        with self.trainer.learner.timer.phase("publish"):
            await self.trainer.publisher.publish(self.trainer.step)

    async def _validate(self) -> dict[str, float]:
        self.display.phase("validation")
        metrics = await self.validator.run()
        if self.exams.exams:
            self.display.phase("benchmarks")
            metrics |= await self.exams.run(self.validator.greedy)
        return metrics

    def _score(self) -> float | None:
        """What the best checkpoint is chosen by: the first validation set's mean reward, else the first benchmark."""
        totals = [value for name, value in self.after.items() if name.startswith("val/") and name.endswith("/total")]
        figures = [value for name, value in self.after.items() if name.startswith("eval/") and name.endswith("/figure")]
        return next(iter((*totals, *figures)), None)

    def _memory(self) -> dict[str, float]:
        now = {
            "memory/trainer_gib": max(self.workers.call(TrainingRank.memory_gib)),
            "memory/driver_gib": psutil.Process().memory_info().rss / _GIB,
        }
        self.peaks = {name: max(value, self.peaks.get(name, 0.0)) for name, value in now.items()}
        return now

    def _save(self, score: float | None) -> Path:
        self.display.phase("saving")
        with self.store.writing(self.trainer.step, score) as unfinished:
            self.workers.call(TrainingRank.save, unfinished.folder)
            check_written(unfinished.folder)
            self.train_tasks.write(unfinished.folder / "hf" / TRAIN_TASKS)
            unfinished.write_state(
                {
                    "command": COMMAND,
                    "made_with": dict(self.made_with),
                    "trainer": self.trainer.state(),
                    "trackers": self.trackers.state(),
                    "watch": self.watch.state(),
                    "before": self.before,
                    "after": self.after,
                }
            )
        latest = self.store.latest()
        assert latest is not None
        return latest

    def _resume(self) -> Path | None:
        """Take up where the saved run stands, if there is one."""
        if self.saved is None:
            self.trackers.restore(-1, {})
            self.transcripts.truncate_after(-1)
            truncate_after(self.folder, -1)
            return None
        self._take_up(self.saved)
        return self.saved.path

    def _take_up(self, saved: Saved) -> None:
        """Stand where the checkpoint was written; the task stream stays where it is."""
        state = saved.state
        self.workers.call(TrainingRank.load, saved.path)
        self.trainer.restore(state["trainer"])
        self.watch.restore(state["watch"])
        self.trackers.restore(self.trainer.step, state["trackers"])
        self.transcripts.truncate_after(self.trainer.step)
        truncate_after(self.folder, self.trainer.step)
        self.before, self.after = state["before"], state["after"]

    def table(self) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
        """(before, after) by validation set, for the table at the end."""
        return _by_set(self.before), _by_set(self.after)


def _due(step: int, frequency: int) -> bool:
    return frequency > 0 and step % frequency == 0


def _by_set(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """val/<set>/<metric> -> {set: {metric: value}}; eval/<category>/figure -> {"benchmarks": {category: value}}"""
    sets: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        kind, rest = name.split("/", 1)
        chosen, metric = rest.split("/", 1) if kind == "val" else ("benchmarks", rest.removesuffix("/figure"))
        sets.setdefault(chosen, {})[metric] = value
    return sets


def check_written(folder: Path) -> None:
    """Raises DataError if what the ranks wrote cannot be seen from here."""
    for part in ("actor/.metadata", "hf/config.json"):
        if not (folder / part).is_file():
            raise DataError(
                f"lacks {part}, which a trainer rank wrote elsewhere",
                mend="Set trainer.default_local_dir to a folder that all nodes share",
                file=str(folder),
            )
