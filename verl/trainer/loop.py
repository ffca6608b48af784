"""The outer training loop: train, validate, checkpoint, log.

Saving and recording run in threads: rollouts may be in flight, and a blocked event loop would eat up the timeouts of
their tools. A checkpoint is written while training goes on, as soon as the ranks have copied what belongs to it.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil

from verl.checkpoint.checkpoint import read_state
from verl.checkpoint.crash import crash_reported, describe_resume
from verl.checkpoint.deadline import start_shutdown_timer
from verl.checkpoint.manifest import Checkpoint
from verl.checkpoint.state import Saved
from verl.config.schema import TrainerConfig
from verl.host.daemon import run_in_daemon_thread
from verl.host.signals import Ended, StopRequest, exit_code
from verl.tracking.console import Display, metrics_by_set
from verl.tracking.transcripts import sample_rows
from verl.trainer.callbacks import Callbacks, main_metric
from verl.trainer.checkpointing import Checkpointing
from verl.trainer.cli import announce_checkpoint
from verl.trainer.collapse_policy import CollapseError, CollapsePolicy
from verl.trainer.hooks import OnlineEval
from verl.trainer.ppo import PPOTrainer
from verl.trainer.stall import StallWatch
from verl.trainer.validate import Validator
from verl.units import GIB
from verl.workers.rank import TrainingRank

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_Saving = tuple[int, asyncio.Task[Path]]  # a checkpoint's step, and its folder once it is written
COMMAND = "main_ppo"


class StopRequestedError(Exception):
    """A signal has requested a shutdown, and no update is in progress."""


@dataclass(kw_only=True)
class TrainingRun:
    """The loop around the training step."""

    settings: TrainerConfig
    total_steps: int
    checkpointing: Checkpointing  # with all parts that have a state
    validator: Validator
    online_eval: OnlineEval | None
    display: Display
    peaks: dict[str, float] = field(default_factory=dict)  # maximum of every memory metric
    stop: StopRequest = field(default_factory=StopRequest)
    loop: asyncio.AbstractEventLoop | None = None  # set by `run`
    saving: _Saving | None = None  # a checkpoint that is being written
    last: Path | None = None  # the newest checkpoint's folder

    @property
    def trainer(self) -> PPOTrainer:
        return self.checkpointing.trainer

    @property
    def collapse(self) -> CollapsePolicy:
        return self.checkpointing.collapse

    @property
    def callbacks(self) -> Callbacks:
        return self.checkpointing.callbacks

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
                crash_reported(self.checkpointing.folder, self._describe_progress),
            ):
                try:
                    try:
                        return await self._run()
                    except Exception:
                        if self.saving is not None:  # a checkpoint of a step before the failure is not lost
                            await asyncio.gather(self.saving[1], return_exceptions=True)
                        raise
                except StopRequestedError:
                    number, note = await self._save_on_signal()
            start_shutdown_timer(exit_code(number), note)
            raise Ended(number, note)
        finally:
            following.cancel()
            await self.trainer.rollouts.close()
            if self.online_eval is not None:
                await self.online_eval.close()

    @property
    def stalls(self) -> StallWatch:
        """Whether `run` has made no progress for trainer.stall_timeout_s."""

        def progress() -> object:
            rollouts = self.trainer.rollouts.rollout.progress
            steps = self.trainer.step, self.display.phase_started, self.checkpointing.workers.finished_calls
            return *steps, rollouts.done, rollouts.tokens

        return StallWatch(self.settings.stall_timeout_s, progress, self._moment, lambda: self.loop)

    async def _run(self) -> Path:
        self.last, validated = self.checkpointing.resume(), self.checkpointing.validated
        if self._done and validated.unlogged is None:
            assert self.last is not None
            has = self.callbacks.stopped or f"all {self.total_steps} steps are trained"
            _log.warning("%s is the last checkpoint, nothing is left to train: %s", self.last, has)
            return self.last
        async with self.trainer.weight_sync.ranks:
            await self.trainer.sync_weights()
        self.display.started()
        if self.trainer.step == 0 and self.settings.val_before_train and (self.validator.sets or self.online_eval):
            validated.before = await self._validate()
            self.checkpointing.trackers.log(0, validated.before)
        save_pending = False  # a checkpoint was due while a collapse rule was triggered
        while not self._done or validated.unlogged is not None:
            unlogged, validated.unlogged = validated.unlogged, None
            metrics = await self._train_step() if unlogged is None else dict(unlogged)
            if metrics is None:
                save_pending = False
                continue
            if self.saving is not None and self.saving[1].done():
                await self._finish_saving()
            step = self.trainer.step
            is_validated = self._done or _due(step, self.settings.test_freq)
            if is_validated:
                self._take_snapshot(unlogged=metrics)
                validated.after = await self._validate()
                metrics |= validated.after
            self.checkpointing.trackers.log(step, metrics)
            save_pending = save_pending or self._done or _due(step, self.settings.save_freq)
            if save_pending and (self._done or self.collapse.may_save):
                await self._save(is_validated)
                save_pending = False
        await self._finish_saving()
        if self.callbacks.stopped is not None:
            _log.warning("stopped after step %d of %d: %s", self.trainer.step, self.total_steps, self.callbacks.stopped)
        assert self.last is not None
        return self.last

    async def _train_step(self) -> dict[str, float] | None:
        """Train, record and watch one step. Returns its metrics; None: the run was rolled back.

        Raises CollapseError if the run must stop.
        """
        self._take_snapshot()
        result = await self._run_interruptibly(self.trainer.train_step)
        step, metrics = self.trainer.step, dict(result.metrics)
        self.checkpointing.transcripts.write(step, result.groups)
        self.checkpointing.trackers.log_rollouts(step, sample_rows(result.groups))
        if self.trainer.keeper is not None:
            await run_in_daemon_thread(self.trainer.keeper.write, step, result.samples)
        recorder = self.checkpointing.recorder
        if recorder is not None and self.settings.record:
            await run_in_daemon_thread(recorder.write, step, result.batch, result.coefficients, metrics)
        alarms = self.collapse.watch.observe(step, metrics)
        metrics |= {"collapse/triggered_rules": float(len(self.collapse.watch.triggered)), **self._memory()}
        if alarms:
            await self._finish_saving()
            try:
                checkpoint = self.collapse.checkpoint_to_load(step, alarms, metrics)
            except CollapseError:
                self.checkpointing.trackers.log(step, metrics)
                raise
            if checkpoint is not None:
                await self._roll_back(checkpoint)
                return None
        self.callbacks.on_step(step, metrics)
        return metrics

    async def _roll_back(self, checkpoint: Path) -> None:
        """Load the checkpoint, and continue with other prompts."""
        await self.trainer.rollouts.restart()
        state = read_state(checkpoint)
        then, now = state["trainer"]["rollouts"], self.trainer.rollouts.state()
        state["trainer"]["rollouts"] = {**now, "shaping": then["shaping"]}  # no prompt is repeated or lost
        async with self.trainer.weight_sync.ranks:
            self.checkpointing.load(Saved(checkpoint, state))
            await self.trainer.sync_weights()

    @property
    def _done(self) -> bool:
        return self.trainer.step >= self.total_steps or self.callbacks.stopped is not None

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
        if self.settings.save_on_signal:
            self.checkpointing.take_snapshot(unlogged)

    async def _save(self, is_validated: bool) -> None:
        """Start a checkpoint. is_validated: whether the last validation is of this step"""
        await self._finish_saving()
        state = copy.deepcopy(self.checkpointing.state())  # training goes on while it is written
        self.saving = await self._start_saving(self._score() if is_validated else None, state)

    async def _start_saving(self, score: float | None, state: Mapping[str, Any]) -> _Saving:
        """Returns once the ranks have copied what belongs to the checkpoint."""
        step, loop, staged = self.trainer.step, asyncio.get_running_loop(), asyncio.Event()
        async with self.trainer.weight_sync.ranks:
            self.display.phase("saving")
            save = partial(self.checkpointing.save, step, score, state, partial(loop.call_soon_threadsafe, staged.set))
            saving, waiting = asyncio.create_task(run_in_daemon_thread(save)), asyncio.create_task(staged.wait())
            await asyncio.wait((waiting, saving), return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
        if saving.done():
            saving.result()  # raises what has prevented the copies
        return step, saving

    async def _finish_saving(self) -> None:
        """Wait until the started checkpoint is on disk, if there is one. Raises what has prevented it."""
        if self.saving is None:
            return
        (step, task), self.saving = self.saving, None
        self.last = await task
        self.callbacks.on_checkpoint(step, self.last)

    async def _save_on_signal(self) -> tuple[int, str]:
        """(the signal, the outcome for the user)"""
        assert self.stop.number is not None
        await self._finish_saving()
        step, last = self.trainer.step, self.checkpointing.store.latest()
        if step == 0:
            note = "no step was trained, nothing to save"
        elif last is not None and last.name == Checkpoint(step, 0, None, {}).name:
            note = f"{last} is up to date"
        elif not self.collapse.may_save:
            note = f"not saved, because a collapse rule is triggered; the newest checkpoint is {last}"
        else:
            _, saving = await self._start_saving(None, self.checkpointing.snapshot)
            note = f"saved {await saving}"
        return self.stop.number, f"{note}. The same command resumes from there"

    def _describe_progress(self) -> str:
        """Step and phase of a failure, and how to resume."""
        return f"It failed {self._moment()}. {describe_resume(self.checkpointing.store)}"

    def _moment(self) -> str:
        phase, step = self.display.running, self.trainer.step
        moment = f"in step {step + 1}" if self.trainer.learning or phase == "rollout" else f"after step {step}"
        return f"{moment} of {self.total_steps}, {phase}"

    async def _validate(self) -> dict[str, float]:
        """The metrics of validation sets and benchmarks."""
        metrics = await self._run_interruptibly(self._validation_metrics)
        self.callbacks.on_validation(self.trainer.step, metrics)
        return metrics

    async def _validation_metrics(self) -> dict[str, float]:
        self.display.phase("validation")
        step = self.trainer.step
        rollouts = await self.validator.rollouts(step)
        if rollouts:
            self.checkpointing.transcripts.write_validation(step, self.validator.rows(rollouts, step))
        metrics = self.validator.metrics(rollouts, step)
        if self.online_eval is not None:
            self.display.phase("benchmarks")
            metrics |= await self.online_eval.run(self.validator.greedy)
        return metrics

    def _score(self) -> float | None:
        """Score for keep_best: the first validation set's mean reward, else the first benchmark."""
        after = self.checkpointing.validated.after
        name = main_metric(after)
        return None if name is None else after[name]

    def _memory(self) -> dict[str, float]:
        driver = psutil.Process().memory_info().rss / GIB
        workers = self.checkpointing.workers
        now = {"memory/trainer_gib": max(workers.call(TrainingRank.memory_gib)), "memory/driver_gib": driver}
        self.peaks = {name: max(value, self.peaks.get(name, 0.0)) for name, value in now.items()}
        layers = workers.call(TrainingRank.checkpointed_layers)[0]
        return {**now, "memory/checkpointed_layers": float(layers)}

    def table(self) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
        """(before, after) by validation set, for the table at the end."""
        validated = self.checkpointing.validated
        return metrics_by_set(validated.before), metrics_by_set(validated.after)


def _due(step: int, frequency: int) -> bool:
    return frequency > 0 and step % frequency == 0
