"""Deliberate defects of the production code, by which the simulation is tested: every one must be found."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from verl.build import run as builders
from verl.checkpoint import checkpoint
from verl.checkpoint.checkpoint import CheckpointStore
from verl.data.tasks import TaskStream
from verl.episodes.group import GroupRollout
from verl.episodes.manager import RolloutManager
from verl.rollout import pool
from verl.rollout.pool import EnginePool
from verl.scoring.pool import _Worker
from verl.tracking.jsonl import JsonlTracker
from verl.trainer.checkpointing import Checkpointing
from verl.trainer.ppo import PPOTrainer
from verl.trainer.weight_sync import WeightSync

Patch = pytest.MonkeyPatch


def no_retry_of_a_request(patch: Patch) -> None:
    patch.setattr(pool, "_ATTEMPTS", 1)


def no_retry_of_a_score(patch: Patch) -> None:
    patch.setattr(_Worker, "_score_twice", lambda self, call: self._ready_process().score(call))


def rows_of_later_steps_are_kept(patch: Patch) -> None:
    patch.setattr(JsonlTracker, "restore", lambda self, step, state: None)


def prompts_in_flight_are_not_saved(patch: Patch) -> None:
    state = RolloutManager.state

    def without(self: RolloutManager) -> dict[str, Any]:
        return {**state(self), "pending": []}

    patch.setattr(RolloutManager, "state", without)


def the_data_begins_anew(patch: Patch) -> None:
    def anew(config: Any, train: Any, saved: Any) -> TaskStream:
        return TaskStream(train, config.data.weights, config.trainer.seed, shuffle=config.data.shuffle)

    patch.setattr(builders, "resumed_stream", anew)


def an_epoch_begins_anew(patch: Patch) -> None:
    resumed = builders.resumed_stream

    def within(config: Any, train: Any, saved: Any) -> TaskStream:
        stream = resumed(config, train, saved)
        stream._drawn = [count % rows for count, rows in zip(stream._drawn, stream._rows, strict=True)]
        return stream

    patch.setattr(builders, "resumed_stream", within)


def a_cancellation_is_swallowed(patch: Patch) -> None:
    judge = GroupRollout._judge

    async def never_cancelled(self: GroupRollout, *args: Any) -> Any:
        try:
            return await judge(self, *args)
        except asyncio.CancelledError:
            await asyncio.Event().wait()

    patch.setattr(GroupRollout, "_judge", never_cancelled)


def a_replacement_works_without_weights(patch: Patch) -> None:
    def admit(self: EnginePool) -> None:
        self._ready |= set(range(self._workers.size)) - self._lost.keys()
        self._open.set()
        if self._ready:
            self._usable.set()

    patch.setattr(EnginePool, "_admit", admit)

    async def nothing_to_sync(self: WeightSync, version: int) -> list[Any]:
        await self.engine.replace_lost()
        return []

    patch.setattr(WeightSync, "_to_lost", nothing_to_sync)


def a_checkpoint_is_not_swapped_in_at_once(patch: Patch) -> None:
    def copy(unfinished: Path, target: Path) -> None:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(unfinished, target)

    patch.setattr(checkpoint, "_swap_in", copy)


def what_a_killed_save_leaves_stays(patch: Patch) -> None:
    patch.setattr(CheckpointStore, "_clear_leftovers", lambda self: None)


def the_state_is_saved_as_it_is_at_the_signal(patch: Patch) -> None:
    def current(self: Checkpointing, score: float | None, state: Mapping[str, Any]) -> Path:
        return save(self, score, self.state())

    save = Checkpointing.save
    patch.setattr(Checkpointing, "save", current)


def an_update_is_cancelled(patch: Patch) -> None:
    patch.setattr(PPOTrainer, "learning", property(lambda self: False, lambda self, value: None), raising=False)


def the_metrics_of_a_step_are_lost_with_its_validation(patch: Patch) -> None:
    state = Checkpointing.state
    patch.setattr(Checkpointing, "state", lambda self, unlogged=None: state(self))


def the_step_is_saved_before_it_is_logged(patch: Patch) -> None:
    """A checkpoint of a step whose row is missing, if the run is killed in between."""
    log = JsonlTracker.log
    rows: list[tuple[Any, ...]] = []

    def late(self: JsonlTracker, step: int, metrics: Mapping[str, float]) -> None:
        rows.append((step, metrics))
        if step == 0 or len(rows) > 1 or step == 20:
            for each in rows:
                log(self, *each)
            rows.clear()

    restore = JsonlTracker.restore

    def anew(self: JsonlTracker, step: int, state: dict[str, Any]) -> None:
        rows.clear()
        restore(self, step, state)

    patch.setattr(JsonlTracker, "log", late)
    patch.setattr(JsonlTracker, "restore", anew)


MUTANTS: tuple[Callable[[Patch], None], ...] = (
    no_retry_of_a_request,
    no_retry_of_a_score,
    rows_of_later_steps_are_kept,
    prompts_in_flight_are_not_saved,
    the_data_begins_anew,
    an_epoch_begins_anew,
    a_cancellation_is_swallowed,
    a_replacement_works_without_weights,
    a_checkpoint_is_not_swapped_in_at_once,
    what_a_killed_save_leaves_stays,
    the_state_is_saved_as_it_is_at_the_signal,
    an_update_is_cancelled,
    the_metrics_of_a_step_are_lost_with_its_validation,
    the_step_is_saved_before_it_is_logged,
)
