"""Supervised fine-tuning on demonstrations: the same ranks, packs and checkpoints as reinforcement learning."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any, Generic

import numpy as np
from rich.console import Console

from verl.checkpoint.checkpoint import CheckpointStore
from verl.checkpoint.crash import describe_resume
from verl.checkpoint.deadline import start_shutdown_timer
from verl.checkpoint.state import Saved
from verl.data.overlap import TrainTasks
from verl.host.signals import Ended, StopRequest, exit_code
from verl.sft.objectives import Example, Likelihood, Objective
from verl.single_controller.group import WorkerGroup
from verl.tracking.timers import PhaseTimer
from verl.tracking.tracker import Trackers
from verl.trainer.checkpointing import save_checkpoint
from verl.trainer.cli import announce_checkpoint
from verl.trainer.metrics import Metrics
from verl.trainer.not_finite import is_left_out
from verl.trainer.policy import Policy
from verl.workers.rank import TrainingRank

COMMAND = "main_sft"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTSettings:
    """Number of steps, batch size, and the intervals of validation and checkpoints."""

    total_steps: int
    batch_size: int
    test_freq: int = 0
    save_freq: int = 0
    seed: int = 0


@dataclass(kw_only=True)
class SFTRun(Generic[Example]):
    """The SFT loop: examples in seeded order, one optimizer step per batch."""

    settings: SFTSettings
    train: Sequence[Example]
    val: Sequence[Example]
    policy: Policy
    workers: WorkerGroup  # TrainingRanks
    store: CheckpointStore
    trackers: Trackers
    timer: PhaseTimer
    resume_config: Mapping[str, Any]  # settings that must not change on resume
    contents: Mapping[str, Any]  # contents of what they name (verl/checkpoint/contents.py)
    objective: Objective[Any] = field(default_factory=Likelihood)
    saved: Saved | None = None  # checkpoint to resume from
    step: int = 0
    train_tasks: TrainTasks = field(default_factory=TrainTasks)  # written into every exported model
    tool_call_format: str | None = None  # format of the demonstrations, for the record
    stop: StopRequest = field(default_factory=StopRequest)

    def run(self) -> Path:
        """Train all remaining steps. Returns the last checkpoint's folder."""
        with ThreadPoolExecutor(1, "checkpoint") as writer:  # a failure waits for what is being written
            return self._run(writer)

    def _run(self, writer: Executor) -> Path:
        settings, saving = self.settings, Future[Path]()
        self.train, self.val = (self.objective.prepared(self.policy, each) for each in (self.train, self.val))
        saving.set_result(self._resume() or self.store.folder)  # where the first will be
        if self.step == 0 and self.val:
            self.trackers.log(0, self._validated())
        for batch in self._batches():
            self.timer.start()
            with self.timer.phase("update"):
                learned = self.objective.step(self.policy, batch)
            self.step += 1
            timings = self.timer.metrics()
            tokens = self.objective.num_tokens(batch)
            metrics = {
                **learned,
                **timings,
                "perf/update_tokens_per_s": tokens / timings["time/update_s"],
            }
            if is_left_out(metrics, "actor"):
                _log.warning("step %d: the update is not finite and was left out; lower actor.optim.lr", self.step)
            done = self.step == settings.total_steps
            if self.val and (done or (settings.test_freq and self.step % settings.test_freq == 0)):
                metrics |= self._validated()
            self.trackers.log(self.step, metrics)
            if saving.done():
                saving.result()  # raises what has prevented it
            if done or self.stop.number is not None or (settings.save_freq and self.step % settings.save_freq == 0):
                saving.result()
                saving = self._save(writer, metrics.get(f"val/{self.objective.name}/loss"))
            if self.stop.number is not None and not done:
                note = f"saved {saving.result()}. The same command resumes from there"
                start_shutdown_timer(exit_code(self.stop.number), note)
                raise Ended(self.stop.number, note)
        return saving.result()

    def listening(self, listens: bool, console: Console) -> AbstractContextManager[None]:
        """Context in which a signal requests a checkpoint and a shutdown; the current step is finished first."""
        return self.stop.listening(announce_checkpoint(console)) if listens else nullcontext()

    def where(self) -> str:
        """Step of a failure, and how to resume."""
        return f"It failed after step {self.step} of {self.settings.total_steps}. {describe_resume(self.store)}"

    def _batches(self) -> Iterator[list[Example]]:
        """The remaining batches; each epoch is shuffled by seed and epoch, so the order need not be saved."""
        size, count = self.settings.batch_size, len(self.train)
        orders: dict[int, list[int]] = {}
        while self.step < self.settings.total_steps:
            batch = []
            for number in range(self.step * size, (self.step + 1) * size):
                epoch, place = divmod(number, count)
                if epoch not in orders:
                    orders = {epoch: np.random.default_rng((self.settings.seed, epoch)).permutation(count).tolist()}
                batch.append(self.train[orders[epoch][place]])
            yield batch

    def _validated(self) -> Metrics:
        with self.timer.phase("validation"):
            measured = self.objective.measured(self.policy, self.val)
        return {f"val/{self.objective.name}/{name}": value for name, value in measured.items()}

    def _save(self, writer: Executor, loss: float | None) -> Future[Path]:
        """Start a checkpoint. Returns once the ranks have copied what belongs to it."""
        state = {
            "command": COMMAND,
            "resume_config": dict(self.resume_config),
            "contents": dict(self.contents),
            "step": self.step,
            "trackers": copy.deepcopy(self.trackers.state()),
            "tool_call_format": self.tool_call_format,
        }
        score, staged = None if loss is None else -loss, Event()
        parts = self.store, self.step, score, self.workers, self.train_tasks, state, staged.set
        saving = writer.submit(save_checkpoint, *parts)
        saving.add_done_callback(lambda _: staged.set())
        staged.wait()
        return saving

    def _resume(self) -> Path | None:
        if self.saved is None:
            self.trackers.restore(-1, {})
            return None
        self.workers.call(TrainingRank.load, self.saved.path)
        self.step = self.saved.state["step"]
        self.trackers.restore(self.step, self.saved.state["trackers"])
        return self.saved.path
