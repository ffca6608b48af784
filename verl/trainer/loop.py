"""A run from its first step to its last: train, validate, save, tell.

What takes long and is nobody's turn to wait for (saving, recording) is done in a thread: rollouts may be in flight, and
the seconds of their tools would run on while the event loop stood still.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from verl.daemon import run_in_daemon_thread
from verl.errors import DataError
from verl.evaluation.overlap import TRAIN_TASKS, TrainTasks
from verl.signals import Ended, StopRequest, exit_code
from verl.single_controller.group import WorkerGroup
from verl.tracking.console import Display
from verl.tracking.jsonl import append_row, finite
from verl.tracking.tracker import Trackers
from verl.tracking.transcripts import Transcripts
from verl.trainer.checkpoint import CheckpointStore, read_state
from verl.trainer.collapse import MAX_ROLLBACKS, Alarm, CollapseError, CollapseWatch
from verl.trainer.command import announce_checkpoint
from verl.trainer.crash import crash_reported, describe_resume
from verl.trainer.deadline import begin_shutdown
from verl.trainer.manifest import Checkpoint
from verl.trainer.online_eval import OnlineEvaluator
from verl.trainer.ppo import PPOTrainer
from verl.trainer.record import Recorder, truncate_after
from verl.trainer.state import Saved
from verl.trainer.validate import Validator
from verl.workers.rank import TrainingRank

_log = logging.getLogger(__name__)
_GIB = 2**30
_T = TypeVar("_T")
COMMAND = "main_ppo"


class StopAskedError(Exception):
    """A signal has asked for the end, and the ranks hold a whole step."""


@dataclass(frozen=True, slots=True)
class TrainingRunConfig:
    """How long, and how often what."""

    total_steps: int
    test_freq: int = 0  # 0: only before and after
    save_freq: int = 0  # 0: only at the end
    val_before_train: bool = True
    on_collapse: str = "warn"  # stop | rollback
    save_on_signal: bool = False


@dataclass
class TrainingRun:
    """The loop around the training step. Validations before and after are kept for the table at the end."""

    settings: TrainingRunConfig
    trainer: PPOTrainer
    validator: Validator
    exams: OnlineEvaluator
    workers: WorkerGroup  # of TrainingRanks
    store: CheckpointStore
    trackers: Trackers
    transcripts: Transcripts
    display: Display
    resume_config: Mapping[str, Any]  # settings that a resumed run must share
    folder: Path  # the run's
    saved: Saved | None = None  # where to go on
    watch: CollapseWatch = field(default_factory=CollapseWatch)
    recorder: Recorder | None = None
    train_tasks: TrainTasks = field(default_factory=TrainTasks)  # written into every exported model
    rollbacks: int = 0
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)  # of every memory metric
    stop: StopRequest = field(default_factory=StopRequest)
    whole: dict[str, Any] = field(default_factory=dict)  # state after the last whole step, with save_on_signal
    unlogged: Mapping[str, float] | None = None  # of the step that a resumed run has still to validate

    async def run(self) -> Path:
        """Train all steps that are left. Returns the last checkpoint's folder.

        Raises Ended where a signal has asked for a checkpoint and an end.
        """
        try:
            with self._listening(), crash_reported(self.folder, self._where):
                try:
                    return await self._run()
                except StopAskedError:
                    number, note = await self._saved_for_signal()
            begin_shutdown(exit_code(number), note)
            raise Ended(number, note)
        finally:
            await self.trainer.rollouts.close()
            await self.exams.close()

    async def _run(self) -> Path:
        last = self._resume()
        if self.trainer.step >= self.settings.total_steps and self.unlogged is None:
            assert last is not None
            _log.warning("%s has all %d steps already: nothing is left to train", last, self.settings.total_steps)
            return last
        async with self.trainer.weight_sync.ranks:
            await self._publish()
        if self.trainer.step == 0 and self.settings.val_before_train and (self.validator.sets or self.exams.exams):
            self.before = await self._unless_stopped(self._validate)
            self.trackers.log(0, self.before)
        save_pending = False  # a checkpoint that fell due while a collapse rule was triggered
        while self.trainer.step < self.settings.total_steps or self.unlogged is not None:
            if self.unlogged is None:
                self._remember()
                metrics = await self._unless_stopped(self.trainer.train_step)
                self.transcripts.write(self.trainer.step, self.trainer.groups)
                if self.recorder is not None:
                    await run_in_daemon_thread(
                        self.recorder.write, self.trainer.step, self.trainer.train_batch, metrics
                    )
                alarms = self.watch.observe(self.trainer.step, metrics)
                metrics |= {"collapse/triggered_rules": float(len(self.watch.triggered)), **self._memory()}
                if alarms and await self._handle_collapse(alarms, metrics):
                    save_pending = False
                    continue
            else:
                metrics, self.unlogged = dict(self.unlogged), None
            step, done = self.trainer.step, self.trainer.step == self.settings.total_steps
            tested = done or _due(step, self.settings.test_freq)
            if tested:
                self._remember(unlogged=metrics)
                self.after = await self._unless_stopped(self._validate)
                metrics |= self.after
            self.trackers.log(step, metrics)
            save_pending = save_pending or done or _due(step, self.settings.save_freq)
            if save_pending and (done or self._may_save):
                score, state = self._score() if tested else None, self._state()
                async with self.trainer.weight_sync.ranks:
                    last, save_pending = await run_in_daemon_thread(self._save, score, state), False
        assert last is not None
        return last

    @property
    def _may_save(self) -> bool:
        """Whether the newest checkpoint may be of now: a run that can be taken back is not taken back to a collapse."""
        return self.settings.on_collapse == "warn" or not self.watch.triggered

    def _listening(self) -> AbstractContextManager[None]:
        listens = self.settings.save_on_signal
        return self.stop.listening(announce_checkpoint(self.display.console)) if listens else nullcontext()

    async def _unless_stopped(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """What `work` gives. Where a stop is asked for it is given up, but for a step whose update has begun.

        Raises StopAskedError while the ranks hold what `_remember` has noted.
        """
        task, asked = asyncio.ensure_future(work()), asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait((task, asked), return_when=asyncio.FIRST_COMPLETED)
            if self.stop.number is None or self.trainer.learning or (task.done() and task.exception() is None):
                return await task
            raise StopAskedError
        finally:
            for each in (task, asked):
                each.cancel()
            await asyncio.gather(task, asked, return_exceptions=True)

    def _remember(self, unlogged: Mapping[str, float] | None = None) -> None:
        """Note the controller's state while it is that of a whole step: tasks are drawn before the next one is done.

        unlogged: the step's metrics, if they wait for a validation
        """
        if self.settings.save_on_signal:
            self.whole = json.loads(json.dumps(self._state(unlogged)))

    async def _saved_for_signal(self) -> tuple[int, str]:
        """(the signal, what has become of the run)"""
        assert self.stop.number is not None
        step, last = self.trainer.step, self.store.latest()
        if step == 0:
            note = "no step was trained, so there was nothing to save"
        elif last is not None and last.name == Checkpoint(step, 0, None, {}).name:
            note = f"{last} has all that was trained"
        elif not self._may_save:
            note = f"not saved, because a collapse rule is triggered; the newest checkpoint is {last}"
        else:
            async with self.trainer.weight_sync.ranks:
                last = await run_in_daemon_thread(self._save, None, self.whole)
            note = f"saved {last}"
        return self.stop.number, f"{note}. The same command goes on from there"

    def _where(self) -> str:
        """What a failure met, and what is left of the run."""
        phase, step, total = self.display.running, self.trainer.step, self.settings.total_steps
        inside = self.trainer.learning or phase == "rollout"
        moment = f"in step {step + 1}" if inside else f"after step {step}"
        return f"It failed {moment} of {total}, {phase}. {describe_resume(self.store)}"

    async def _handle_collapse(self, alarms: Sequence[Alarm], metrics: Mapping[str, float]) -> bool:
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
        async with self.trainer.weight_sync.ranks:
            self._load_checkpoint(Saved(path, state))
            await self._publish()
        return True

    async def _publish(self) -> None:
        with self.trainer.learner.timer.phase("weight_sync"):
            await self.trainer.weight_sync.sync(self.trainer.step)

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
        scores = [value for name, value in self.after.items() if name.startswith("eval/") and name.endswith("/score")]
        return next(iter((*totals, *scores)), None)

    def _memory(self) -> dict[str, float]:
        now = {
            "memory/trainer_gib": max(self.workers.call(TrainingRank.memory_gib)),
            "memory/driver_gib": psutil.Process().memory_info().rss / _GIB,
        }
        self.peaks = {name: max(value, self.peaks.get(name, 0.0)) for name, value in now.items()}
        return now

    def _state(self, unlogged: Mapping[str, float] | None = None) -> dict[str, Any]:
        """The controller's, for a checkpoint. unlogged: metrics of the step that wait for its validation"""
        return {
            "command": COMMAND,
            "resume_config": dict(self.resume_config),
            "trainer": self.trainer.state(),
            "trackers": self.trackers.state(),
            "watch": self.watch.state(),
            "before": self.before,
            "after": self.after,
            "unlogged": None if unlogged is None else dict(unlogged),
        }

    def _save(self, score: float | None, state: Mapping[str, Any]) -> Path:
        self.display.phase("saving")
        with self.store.writing(self.trainer.step, score) as unfinished:
            self.workers.call(TrainingRank.save, unfinished.folder)
            check_written(unfinished.folder)
            self.train_tasks.write(unfinished.folder / "hf" / TRAIN_TASKS)
            unfinished.write_state(state)
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
        self._load_checkpoint(self.saved)
        return self.saved.path

    def _load_checkpoint(self, saved: Saved) -> None:
        """Stand where the checkpoint was written; the task stream stays where it is."""
        state = saved.state
        self.workers.call(TrainingRank.load, saved.path)
        self.trainer.restore(state["trainer"])
        self.watch.restore(state["watch"])
        self.trackers.restore(self.trainer.step, state["trackers"])
        self.transcripts.truncate_after(self.trainer.step)
        truncate_after(self.folder, self.trainer.step)
        self.before, self.after = state["before"], state["after"]
        self.unlogged = state.get("unlogged")  # of a checkpoint that knows of it

    def table(self) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
        """(before, after) by validation set, for the table at the end."""
        return _by_set(self.before), _by_set(self.after)


def _due(step: int, frequency: int) -> bool:
    return frequency > 0 and step % frequency == 0


def _by_set(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """val/<set>/<metric> -> {set: {metric: value}}; eval/<category>/score -> {"benchmarks": {category: value}}"""
    sets: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        kind, rest = name.split("/", 1)
        chosen, metric = rest.split("/", 1) if kind == "val" else ("benchmarks", rest.removesuffix("/score"))
        sets.setdefault(chosen, {})[metric] = value
    return sets


def check_written(folder: Path) -> None:
    """Raises DataError if what the ranks wrote cannot be seen from here."""
    for part in ("actor/.metadata", "hf/config.json"):
        if not (folder / part).is_file():
            raise DataError(
                f"lacks {part}, which a trainer rank wrote elsewhere",
                hint="Set trainer.default_local_dir to a folder that all nodes share",
                file=str(folder),
            )
