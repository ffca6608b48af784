"""The training step, shared by all algorithms.

tasks -> rollout -> samples -> score -> advantages -> updates -> weight sync
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from verl.batch.samples import to_batch
from verl.batch.token_batch import Ints, TokenBatch
from verl.batch.trace import Trace
from verl.episodes.manager import RolloutManager
from verl.host.daemon import run_in_daemon_thread
from verl.trainer.hooks import SampleKeeper
from verl.trainer.learner import Learned, Learner
from verl.trainer.metrics import Meter, Metrics, rollout_metrics, throughput, tool_metrics
from verl.trainer.self_teacher import Demonstrate, with_hints
from verl.trainer.weight_sync import WeightSync
from verl.types import TrajectoryGroup
from verl.verl_compat.metrics import verl_step_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStepResult:
    metrics: Metrics
    groups: Sequence[TrajectoryGroup]  # all groups of the step, those that filters dropped too
    batch: TokenBatch  # as collected; with settings, weights and step number it determines the update
    coefficients: Mapping[str, float]  # `Learner.coefficients` at the start of the step
    samples: Any  # what the keeper collected; None without one


@dataclass(kw_only=True)
class PPOTrainer:
    """Owns the step counter; everything else is passed in."""

    rollouts: RolloutManager
    learner: Learner
    weight_sync: WeightSync
    meter: Meter | None = None
    keeper: SampleKeeper | None = None  # None: no samples are kept, to be looked at
    demonstrate: Demonstrate | None = None  # of a policy that teaches itself
    step: int = 0  # completed steps, which is also the weight version
    learning: bool = False  # from an update to the end of its step: the ranks may hold part of the next step

    async def train_step(self) -> TrainStepResult:
        """One step: generate, score, update, sync weights."""
        timer = self.learner.timer
        timer.start()
        with timer.phase("rollout"):
            collected = await self.rollouts.take(self.step)
        groups = collected.drawn or collected.kept
        batch = to_batch(collected.kept, self.learner.config.env.trains_observations(self.step + 1))
        if self.demonstrate is not None:
            batch = with_hints(batch, collected.kept, self.demonstrate)
        coefficients = self.learner.coefficients
        async with self.weight_sync.ranks:
            if not self._ahead:
                with timer.phase("rollout"):
                    await self.weight_sync.engine.sleep()
            self.learning = True
            chosen = self.keeper.choose(collected.kept) if self.keeper else ()
            outcome, trace = await self._learn(batch, chosen, [group.task.id for group in collected.kept])
            learned = dict(outcome.metrics)
            with timer.phase("weight_sync"):
                learned["engine/canary_logprob_diff"] = await self.weight_sync.sync(self.step + 1)
            if (share := self.weight_sync.merged_share) is not None:
                learned["engine/merged_share"] = share
        metrics = {
            **rollout_metrics(groups),
            **tool_metrics(groups),
            **collected.metrics(),
            **(collected.staleness_metrics() if self._ahead else {}),
            "reward/infrastructure_faults": sum(len(group.faults) for group in groups),
            **await self.weight_sync.engine.metrics(),
            "reward/over_limit": sum(bool(score.exceeded) for group in groups for score in group.scores),
            **learned,
            **self._timings(groups, batch, outcome.computed),
        }
        if self.rollouts.config.trainer.verl_names:
            metrics |= verl_step_metrics(metrics, outcome.batch, groups, self.learner.algorithm, self.rollouts.config)
            metrics["training/global_step"] = self.step + 1
        result = TrainStepResult(
            metrics=metrics,
            groups=groups,
            batch=batch,
            coefficients=coefficients,
            samples=self.keeper.collect(collected.kept, groups, chosen, outcome, trace) if self.keeper else None,
        )
        self.step, self.learning = self.step + 1, False
        return result

    async def sync_weights(self) -> None:
        """Send the current weights to the engines. The caller holds `weight_sync.ranks`."""
        with self.learner.timer.phase("weight_sync"):
            await self.weight_sync.sync(self.step)

    @property
    def _ahead(self) -> bool:
        """Whether rollouts continue during the update (off-policy)."""
        return self.rollouts.config.rollout.max_staleness > 0

    async def _learn(self, batch: TokenBatch, chosen: Sequence[Any], rows: Sequence[str]) -> tuple[Learned, Trace]:
        """In a thread if rollouts continue: a blocked event loop would use up the timeouts of their tools."""
        if self._ahead:
            return await run_in_daemon_thread(self._learn_traced, batch, chosen, rows)
        return self._learn_traced(batch, chosen, rows)

    def _learn_traced(self, batch: TokenBatch, chosen: Sequence[Any], rows: Sequence[str]) -> tuple[Learned, Trace]:
        """chosen: the samples to trace"""
        if not chosen:
            return self.learner.learn(batch, self.step, rows), Trace()
        self.learner.policy.start_trace({each.row for each in chosen})
        learned = self.learner.learn(replace(batch, numbers=np.arange(len(batch))), self.step, rows)
        return learned, self.learner.policy.end_trace()

    def _timings(self, groups: Sequence[TrajectoryGroup], batch: TokenBatch, computed: Ints) -> Metrics:
        """computed: rows of the batch that the update computed"""
        timings, packing = self.learner.timer.metrics(), self.learner.policy.packing
        used = self.meter.mfu(batch.rows(computed), packing, timings["time/update_s"]) if self.meter else {}
        return {**timings, **throughput(groups, batch, computed, timings), **used}

    def state(self) -> dict[str, Any]:
        """The controller's state for a checkpoint, as plain JSON."""
        return {"step": self.step, "coefficients": self.learner.coefficients, "rollouts": self.rollouts.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.rollouts.restore(state["rollouts"])
        older = {} if state.get("kl_coefficient") is None else {"kl": state["kl_coefficient"]}
        self.learner.restore(state.get("coefficients", older))  # older checkpoints have that of the KL term alone
