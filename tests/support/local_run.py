"""A run in one process: a trainer rank and a transformers engine side by side, with nothing but Ray left out."""

from __future__ import annotations

import asyncio
import gc
import inspect
import io
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console

from toolrl.analysis.collapse.collapse import CollapseWatch
from toolrl.analysis.replay.record import Recorder
from toolrl.analysis.samples.keeper import build_keeper
from toolrl.check.preflight.local_group import LocalGroup
from verl.build.run import build_trainer, load_inputs
from verl.build.workers import start_workers
from verl.checkpoint.checkpoint import CheckpointStore
from verl.config.schema import Config
from verl.data.tasks import TaskStream
from verl.scoring.pool import DirectScorer
from verl.scoring.rewards import build_rewards
from verl.single_controller.group import WorkerContext, WorkerView
from verl.tracking.console import Display
from verl.tracking.timers import PhaseTimer
from verl.tracking.tracker import RunInfo, build_trackers
from verl.tracking.transcripts import Transcripts
from verl.trainer.callbacks import Callbacks
from verl.trainer.checkpointing import Checkpointing
from verl.trainer.collapse_policy import CollapsePolicy
from verl.trainer.loop import COMMAND, TrainingRun
from verl.trainer.ppo import PPOTrainer
from verl.trainer.validate import Validator


class Here(LocalGroup):
    """A group of one, as a cluster would describe it."""

    nodes: Sequence[str] = ("here",)
    gpus: Sequence[Sequence[str]] = ((),)

    def started(self) -> None:
        """It is."""


class OneProcess:
    """What `start_workers` needs of a cluster."""

    def pool(self, *_: Any) -> None:
        """There is one place."""

    def group(self, role: str, make: Callable[[WorkerContext], Any], *_: Any, **__: Any) -> Here:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        made = make(WorkerContext(0, 1, "127.0.0.1", port))
        return Here(asyncio.run(made) if inspect.isawaitable(made) else made)


def local_fit(
    trainer: PPOTrainer, config: Config, watch: CollapseWatch, recorder: Recorder | None = None
) -> TrainingRun:
    """A run around a local trainer, which validates on nothing and starts anew."""
    folder = Path(config.trainer.default_local_dir) / config.trainer.experiment_name
    total_steps = config.trainer.total_training_steps
    decode = trainer.rollouts.rollout.episode_runner.chat.tokenizer.decode
    trainer.keeper = build_keeper(config, trainer.learner.algorithm, folder, decode)
    assert total_steps is not None and isinstance(trainer.learner.policy.workers, WorkerView)
    workers, transcripts = trainer.learner.policy.workers.group, Transcripts(folder)
    store = CheckpointStore(folder / "checkpoints", config.trainer.keep_last, 0)
    trackers, callbacks = build_trackers(config.trainer.logger, RunInfo(folder)), Callbacks()
    collapse = CollapsePolicy(
        action=config.trainer.on_collapse, store=store, file=folder / "collapses.jsonl", watch=watch
    )
    checkpointing = Checkpointing(
        store=store,
        folder=folder,
        header={"command": COMMAND, "resume_config": {}, "contents": {}, "rewards": []},
        workers=workers,
        trainer=trainer,
        trackers=trackers,
        collapse=collapse,
        callbacks=callbacks,
        transcripts=transcripts,
        recorder=recorder,
    )
    return TrainingRun(
        settings=replace(config.trainer, test_freq=0, record=recorder is not None),
        total_steps=total_steps,
        validator=Validator({}, trainer.rollouts.rollout, build_rewards(config.reward.name, config.reward.options)),
        online_eval=None,
        checkpointing=checkpointing,
        display=Display(total_steps, Console(file=io.StringIO())),
    )


@contextmanager
def local_trainer(config: Config) -> Iterator[PPOTrainer]:
    """The trainer of a configuration; its process group ends with the block."""
    inputs = load_inputs(config)
    stream = TaskStream(inputs.train, config.data.weights, config.trainer.seed)
    scorer = DirectScorer(inputs.rewards)
    workers = start_workers(config, OneProcess(), inputs.algorithm, "cpu", total_steps=1)  # type: ignore[arg-type]
    try:
        yield build_trainer(config, inputs, stream, workers, scorer, PhaseTimer())
    finally:
        gc.collect()
        dist.destroy_process_group()
