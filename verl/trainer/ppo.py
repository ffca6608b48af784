"""The training step, shared by all algorithms.

tasks -> rollout -> samples -> score -> advantages -> updates -> weight sync
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.batch.samples import to_samples
from verl.batch.train_batch import TrainBatch
from verl.episodes.manager import RolloutManager
from verl.system.daemon import run_in_daemon_thread
from verl.trainer.learner import Learner
from verl.trainer.metrics import Meter, Metrics, rollout_metrics, throughput, tool_metrics
from verl.trainer.weight_sync import WeightSync
from verl.types import Sample, TrajectoryGroup


@dataclass
class PPOTrainer:
    """Owns the step counter; everything else is passed in."""

    rollouts: RolloutManager
    learner: Learner
    weight_sync: WeightSync
    meter: Meter | None = None
    step: int = 0  # completed steps, which is also the weight version
    groups: Sequence[TrajectoryGroup] = ()  # all groups of the last step, for metrics and transcripts
    train_batch: TrainBatch = field(default_factory=TrainBatch)  # of the last step, for its record
    learning: bool = False  # whether an update is in progress: the ranks may hold part of the next step

    async def train_step(self) -> Metrics:
        """One step: generate, score, update, sync weights. Returns its metrics."""
        timer, kl_control = self.learner.timer, self.learner.kl_control
        timer.start()
        with timer.phase("rollout"):
            collected = await self.rollouts.take(self.step)
        self.groups = collected.drawn or collected.kept
        samples = [
            sample
            for number, group in enumerate(collected.kept)
            for sample in to_samples(group, number, self.learner.settings.train_on_observations)
        ]
        baselines = [collected.kept[sample.group].baseline for sample in samples]
        self.train_batch = TrainBatch(samples, baselines, kl_control.coefficient if kl_control else None)
        async with self.weight_sync.ranks:
            if not self._ahead:
                with timer.phase("rollout"):
                    await self.rollouts.rollout.engine.sleep()
            self.learning = True
            learned, computed = await self._learn(self.train_batch)
            with timer.phase("weight_sync"):
                learned["engine/canary_logprob_diff"] = await self.weight_sync.sync(self.step + 1)
            self.step, self.learning = self.step + 1, False
        return {
            **rollout_metrics(self.groups),
            **tool_metrics(self.groups),
            **collected.metrics(),
            **(collected.staleness_metrics() if self._ahead else {}),
            "reward/infrastructure_faults": sum(len(group.faults) for group in self.groups),
            **self.weight_sync.losses(),
            "reward/over_limit": sum(bool(score.exceeded) for group in self.groups for score in group.scores),
            **learned,
            **self._timings(samples, computed),
        }

    @property
    def _ahead(self) -> bool:
        """Whether rollouts continue during the update (off-policy)."""
        return self.rollouts.settings.max_staleness > 0

    async def _learn(self, train_batch: TrainBatch) -> tuple[Metrics, list[Sample]]:
        """In a thread if rollouts continue: a blocked event loop would use up the timeouts of their tools."""
        if self._ahead:
            return await run_in_daemon_thread(self.learner.learn, train_batch, self.step)
        return self.learner.learn(train_batch, self.step)

    def _timings(self, samples: Sequence[Sample], computed: Sequence[Sample]) -> Metrics:
        """computed: samples that the update computed"""
        timings = self.learner.timer.metrics()
        used = self.meter.mfu(computed, self.learner.policy.packing, timings["time/update_s"]) if self.meter else {}
        return {**timings, **throughput(self.groups, samples, computed, timings), **used}

    def state(self) -> dict[str, Any]:
        """The controller's state for a checkpoint, as plain JSON."""
        control = self.learner.kl_control
        coefficient = None if control is None else control.coefficient
        return {"step": self.step, "kl_coefficient": coefficient, "rollouts": self.rollouts.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore `state`."""
        self.step = state["step"]
        self.rollouts.restore(state["rollouts"])
        if self.learner.kl_control is not None and state["kl_coefficient"] is not None:
            self.learner.kl_control.coefficient = state["kl_coefficient"]
