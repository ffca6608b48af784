"""The outer training loop: train, validate, checkpoint, log.

Saving and recording run in threads: rollouts may be in flight, and a blocked event loop would eat up the timeouts of
their tools.
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

from verl.checkpoint.checkpoint import CheckpointStore, read_state
from verl.checkpoint.crash import crash_reported, describe_resume
from verl.checkpoint.deadline import start_shutdown_timer
from verl.checkpoint.manifest import Checkpoint
from verl.checkpoint.state import Saved
from verl.config.schema import TrainerConfig
from verl.data.overlap import TRAIN_TASKS, TrainTasks
from verl.errors import DataError, VerlError
from verl.single_controller.group import WorkerGroup
from verl.system.daemon import run_in_daemon_thread
from verl.system.signals import Ended, StopRequest, exit_code
from verl.tracking.console import Display, metrics_by_set
from verl.tracking.jsonl import append_jsonl, finite, read_jsonl, write_jsonl
from verl.tracking.tracker import Trackers
from verl.tracking.transcripts import Transcripts, sample_rows
from verl.trainer.callbacks import Callbacks, main_metric
from verl.trainer.cli import announce_checkpoint
from verl.trainer.hooks import MAX_ROLLBACKS, NoWatch, OnlineEval, Recorder, Watch, installed_tool
from verl.trainer.ppo import PPOTrainer
from verl.trainer.stall import ending_stalls
from verl.trainer.validate import Validator
from verl.workers.rank import TrainingRank

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
COMMAND = "main_ppo"


class CollapseError(VerlError, RuntimeError):
    """The run has collapsed and must not continue."""


class StopRequestedError(Exception):
    """A signal has requested a shutdown, and no update is in progress."""


@dataclass(kw_only=True)
class TrainingRun:
    """The loop around the training step. The first and last validation are kept for the table at the end."""

    settings: TrainerConfig
    total_steps: int
    trainer: PPOTrainer
    validator: Validator
    online_eval: OnlineEval | None
    workers: WorkerGroup  # of TrainingRanks
    store: CheckpointStore
    trackers: Trackers
    transcripts: Transcripts
    display: Display
    resume_config: Mapping[str, Any]  # settings that must not change on resume
    contents: Mapping[str, Any]  # of what they name (verl/checkpoint/contents.py)
    folder: Path  # of the run
    saved: Saved | None = None  # checkpoint to resume from
    reward_names: Sequence[str] = ()  # of the training rows, for the card of every exported model
    callbacks: Callbacks = field(default_factory=Callbacks)
    watch: Watch = field(default_factory=NoWatch)
    recorder: Recorder | None = None  # None: not installed
    train_tasks: TrainTasks = field(default_factory=TrainTasks)  # written into every exported model
    rollbacks: int = 0
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)  # maximum of every memory metric
    stop: StopRequest = field(default_factory=StopRequest)
    snapshot: dict[str, Any] = field(default_factory=dict)  # state after the last complete step, with save_on_signal
    loop: asyncio.AbstractEventLoop | None = None  # of `run`
    unlogged: Mapping[str, float] | None = None  # metrics of the step whose validation a resumed run has to do

    async def run(self) -> Path:
        """Train all remaining steps. Returns the last checkpoint's folder.

        Raises Ended if a signal has requested a checkpoint and a shutdown.
        """
        self.loop = asyncio.get_running_loop()
        listens, announce = self.settings.save_on_signal, announce_checkpoint(self.display.console)
        following = asyncio.create_task(self.trainer.rollouts.rollout.follow())
        try:
            with (
                self.stop.listening(announce) if listens else nullcontext(),
                crash_reported(self.folder, self._describe_progress),
            ):
                try:
                    return await self._run()
                except StopRequestedError:
                    number, note = await self._save_on_signal()
            start_shutdown_timer(exit_code(number), note)
            raise Ended(number, note)
        finally:
            following.cancel()
            await self.trainer.rollouts.close()
            if self.online_eval is not None:
                await self.online_eval.close()

    def ending_stalls(self) -> AbstractContextManager[None]:
        """Around `run`: raises StalledError after trainer.stall_timeout_s without progress."""

        def progress() -> object:
            rollouts = self.trainer.rollouts.rollout.progress
            steps = self.trainer.step, self.display.phase_started, self.workers.finished_calls
            return *steps, rollouts.done, rollouts.tokens

        return ending_stalls(self.settings.stall_timeout_s, progress, self._moment, lambda: self.loop)

    async def _run(self) -> Path:
        last = self._resume()
        if self._done and self.unlogged is None:
            assert last is not None
            has = self.callbacks.stopped or f"all {self.total_steps} steps are trained"
            _log.warning("%s is the last checkpoint, nothing is left to train: %s", last, has)
            return last
        async with self.trainer.weight_sync.ranks:
            await self.trainer.sync_weights()
        self.display.started()
        has_validation = self.settings.val_before_train and (self.validator.sets or self.online_eval)
        if self.trainer.step == 0 and has_validation:
            self.before = await self._run_interruptibly(self._validate)
            self.trackers.log(0, self.before)
            self.callbacks.on_validation(0, self.before)
        save_pending = False  # a checkpoint was due while a collapse rule was triggered
        while not self._done or self.unlogged is not None:
            if self.unlogged is None:
                self._take_snapshot()
                result = await self._run_interruptibly(self.trainer.train_step)
                metrics = dict(result.metrics)
                self.transcripts.write(self.trainer.step, result.groups)
                self.trackers.log_rollouts(self.trainer.step, sample_rows(result.groups))
                if self.trainer.keeper is not None:
                    await run_in_daemon_thread(self.trainer.keeper.write, self.trainer.step, result.samples)
                if self.recorder is not None and self.settings.record:
                    arguments = (self.trainer.step, result.batch, result.kl_coefficient, metrics)
                    await run_in_daemon_thread(self.recorder.write, *arguments)
                alarms = self.watch.observe(self.trainer.step, metrics)
                metrics |= {"collapse/triggered_rules": float(len(self.watch.triggered)), **self._memory()}
                if alarms and await self._handle_collapse(alarms, metrics):
                    save_pending = False
                    continue
                self.callbacks.on_step(self.trainer.step, metrics)
            else:
                metrics, self.unlogged = dict(self.unlogged), None
            step = self.trainer.step
            tested = self._done or _due(step, self.settings.test_freq)
            if tested:
                self._take_snapshot(unlogged=metrics)
                self.after = await self._run_interruptibly(self._validate)
                metrics |= self.after
                self.callbacks.on_validation(step, self.after)
            self.trackers.log(step, metrics)
            save_pending = save_pending or self._done or _due(step, self.settings.save_freq)
            if save_pending and (self._done or self._may_save):
                score, state = self._score() if tested else None, self._state()
                async with self.trainer.weight_sync.ranks:
                    last, save_pending = await run_in_daemon_thread(self._save, score, state), False
                self.callbacks.on_checkpoint(step, last)
        if self.callbacks.stopped is not None:
            _log.warning("stopped after step %d of %d: %s", self.trainer.step, self.total_steps, self.callbacks.stopped)
        assert last is not None
        return last

    @property
    def _done(self) -> bool:
        return self.trainer.step >= self.total_steps or self.callbacks.stopped is not None

    @property
    def _may_save(self) -> bool:
        """Whether to save now: while a collapse rule is triggered, a run that may roll back must not."""
        return self.settings.on_collapse == "warn" or not self.watch.triggered

    async def _run_interruptibly(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """The result of `work`, which a stop request cancels, except for a step whose update has started.

        Raises StopRequestedError; the ranks are then in the state of the last `_take_snapshot`.
        """
        task, stop_requested = asyncio.ensure_future(work()), asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait((task, stop_requested), return_when=asyncio.FIRST_COMPLETED)
            if self.stop.number is None or self.trainer.learning or (task.done() and task.exception() is None):
                return await task
            raise StopRequestedError
        finally:
            for each in (task, stop_requested):
                each.cancel()
            await asyncio.gather(task, stop_requested, return_exceptions=True)

    def _take_snapshot(self, unlogged: Mapping[str, float] | None = None) -> None:
        """Copy the state between two steps: the next step draws tasks before it is complete. unlogged: see `_state`"""
        if self.settings.save_on_signal:
            self.snapshot = json.loads(json.dumps(self._state(unlogged)))

    async def _save_on_signal(self) -> tuple[int, str]:
        """(the signal, the outcome for the user)"""
        assert self.stop.number is not None
        step, last = self.trainer.step, self.store.latest()
        if step == 0:
            note = "no step was trained, nothing to save"
        elif last is not None and last.name == Checkpoint(step, 0, None, {}).name:
            note = f"{last} is up to date"
        elif not self._may_save:
            note = f"not saved, because a collapse rule is triggered; the newest checkpoint is {last}"
        else:
            async with self.trainer.weight_sync.ranks:
                last = await run_in_daemon_thread(self._save, None, self.snapshot)
            note = f"saved {last}"
        return self.stop.number, f"{note}. The same command resumes from there"

    def _describe_progress(self) -> str:
        """Step and phase of a failure, and how to resume."""
        return f"It failed {self._moment()}. {describe_resume(self.store)}"

    def _moment(self) -> str:
        phase, step = self.display.running, self.trainer.step
        moment = f"in step {step + 1}" if self.trainer.learning or phase == "rollout" else f"after step {step}"
        return f"{moment} of {self.total_steps}, {phase}"

    async def _handle_collapse(self, alarms: Sequence[object], metrics: Mapping[str, float]) -> bool:
        """Apply trainer.on_collapse. Returns whether the run was rolled back.

        Raises CollapseError if the run must stop.
        """
        message = "\n".join(str(alarm) for alarm in alarms)
        step, action = self.trainer.step, self.settings.on_collapse
        path = None if action == "warn" else self.store.latest(hashes=True)
        if action == "rollback" and (path is None or self.rollbacks == MAX_ROLLBACKS):
            action = "stop"
        back_to = path.name if path is not None and action == "rollback" else None
        report = {"step": step, "action": action, "alarms": message.splitlines(), "back_to": back_to}
        append_jsonl(self.folder / "collapses.jsonl", {**report, "metrics": finite(metrics)})
        if action == "warn":
            _log.warning("%s", message)
            return False
        if path is None or action == "stop":
            self.trackers.log(step, metrics)
            tried = f" after {self.rollbacks} rollbacks" if self.rollbacks else ""
            rest = "there is no checkpoint yet" if path is None else f"the last good checkpoint is {path}"
            raise CollapseError(f"the run has collapsed{tried}. {message}\nStopped after step {step}; {rest}")
        self.rollbacks += 1
        count = f"{self.rollbacks} of at most {MAX_ROLLBACKS}"
        _log.warning("%s\nRolled back to %s, continuing with other prompts (rollback %s)", message, path, count)
        await self.trainer.rollouts.restart()
        state = read_state(path)
        then, now = state["trainer"]["rollouts"], self.trainer.rollouts.state()
        state["trainer"]["rollouts"] = {**now, "shaping": then["shaping"]}  # no prompt is repeated or lost
        async with self.trainer.weight_sync.ranks:
            self._load_checkpoint(Saved(path, state))
            await self.trainer.sync_weights()
        return True

    async def _validate(self) -> dict[str, float]:
        self.display.phase("validation")
        step = self.trainer.step
        rollouts = await self.validator.rollouts(step)
        if rollouts:
            self.transcripts.write_validation(step, self.validator.rows(rollouts, step))
        metrics = self.validator.metrics(rollouts, step)
        if self.online_eval is not None:
            self.display.phase("benchmarks")
            metrics |= await self.online_eval.run(self.validator.greedy)
        return metrics

    def _score(self) -> float | None:
        """Score for keep_best: the first validation set's mean reward, else the first benchmark."""
        name = main_metric(self.after)
        return None if name is None else self.after[name]

    def _memory(self) -> dict[str, float]:
        driver = psutil.Process().memory_info().rss / 2**30
        now = {"memory/trainer_gib": max(self.workers.call(TrainingRank.memory_gib)), "memory/driver_gib": driver}
        self.peaks = {name: max(value, self.peaks.get(name, 0.0)) for name, value in now.items()}
        layers = self.workers.call(TrainingRank.checkpointed_layers)[0]
        return {**now, "memory/checkpointed_layers": float(layers)}

    def _state(self, unlogged: Mapping[str, float] | None = None) -> dict[str, Any]:
        """The controller's state for a checkpoint. unlogged: metrics of the step, if its validation is still to come"""
        return {
            "command": COMMAND,
            "resume_config": dict(self.resume_config),
            "contents": dict(self.contents),
            "trainer": self.trainer.state(),
            "trackers": self.trackers.state(),
            "watch": self.watch.state(),
            "callbacks": self.callbacks.state(),
            "rewards": list(self.reward_names),
            "before": self.before,
            "after": self.after,
            "unlogged": None if unlogged is None else dict(unlogged),
        }

    def _save(self, score: float | None, state: Mapping[str, Any]) -> Path:
        self.display.phase("saving")
        return save_checkpoint(self.store, self.trainer.step, score, self.workers, self.train_tasks, state)

    def _resume(self) -> Path | None:
        """Load the saved checkpoint, if there is one."""
        if self.saved is None:
            self._truncate_after(-1, {})
            return None
        self._load_checkpoint(self.saved)
        return self.saved.path

    def _load_checkpoint(self, saved: Saved) -> None:
        """Restore the state of the checkpoint, except for the position in the task stream."""
        state = saved.state
        self.workers.call(TrainingRank.load, saved.path)
        self.trainer.restore(state["trainer"])
        self.watch.restore(state["watch"])
        if "callbacks" in state:  # missing in older checkpoints
            self.callbacks.restore(state["callbacks"])
        self._truncate_after(self.trainer.step, state["trackers"])
        self.before, self.after = state["before"], state["after"]
        self.unlogged = state.get("unlogged")  # missing in older checkpoints

    def _truncate_after(self, step: int, trackers: dict[str, Any]) -> None:
        """Drop what later steps have written. trackers: their state at this step"""
        self.trackers.restore(step, trackers)
        path = self.folder / "collapses.jsonl"
        if path.exists():  # a step that was reverted for a collapse remains
            write_jsonl(path, [row for row in read_jsonl(path) if row["step"] <= step or row.get("action") != "warn"])
        self.transcripts.truncate_after(step)
        if self.trainer.keeper is not None:
            self.trainer.keeper.truncate_after(step)
        if self.recorder is not None:
            self.recorder.truncate_after(step)

    def table(self) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
        """(before, after) by validation set, for the table at the end."""
        return metrics_by_set(self.before), metrics_by_set(self.after)


def _due(step: int, frequency: int) -> bool:
    return frequency > 0 and step % frequency == 0


def save_checkpoint(
    store: CheckpointStore,
    step: int,
    score: float | None,
    workers: WorkerGroup,
    train_tasks: TrainTasks,
    state: Mapping[str, Any],
) -> Path:
    """Write the ranks' files, the exported model's list of training tasks and the controller's state.

    workers: TrainingRanks; score: larger is better, None: not validated
    Returns the checkpoint's folder. Raises DataError if the ranks' files are not visible on this node.
    """
    with store.writing(step, score) as unfinished:
        workers.call(TrainingRank.save, unfinished.folder)
        for part in ("actor/.metadata", "hf/config.json"):
            if not (unfinished.folder / part).is_file():
                raise DataError(
                    f"{part} not found: the ranks write to a file system that this node cannot see",
                    hint="Set trainer.default_local_dir to a folder that all nodes share",
                    file=str(unfinished.folder),
                )
        train_tasks.write(unfinished.folder / "hf" / TRAIN_TASKS)
        if (write_model_files := installed_tool("model_files")) is not None:
            write_model_files(unfinished.folder / "hf", state, user_code=True)
        unfinished.write_state(state)
    latest = store.latest()
    assert latest is not None
    return latest
