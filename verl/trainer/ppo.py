"""The training step: one for every algorithm.

tasks -> rollout -> samples -> score -> advantages -> updates -> publish
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from verl.algorithms.algorithm import Algorithm, KLPlacement, OldLogprobs
from verl.algorithms.kl import AdaptiveKL
from verl.daemon import in_daemon
from verl.data.samples import to_samples
from verl.tracking.timers import PhaseTimer
from verl.trainer import metrics as tell
from verl.trainer.experience import Experience, build_experience, rows_with_signal, with_selected
from verl.trainer.metrics import Meter, Metrics
from verl.trainer.policy import Critic, Policy
from verl.trainer.record import Lesson
from verl.trainer.rollouts import Rollouts
from verl.trainer.weights import Publisher
from verl.types import Sample, TrajectoryGroup

_Input = TypeVar("_Input")
_Output = TypeVar("_Output")


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The batch arithmetic of a step."""

    minibatches_per_step: int = 1
    critic_warmup: int = 0  # first steps, in which the critic alone learns
    train_on_observations: bool = False  # on what the environment said, too
    seed: int = 0


class Learning:
    """What of a step needs no engine: from samples to updated weights. Subclasses are dataclasses with these fields."""

    settings: StepSettings
    algorithm: Algorithm
    policy: Policy
    reference: Policy | None
    critic: Critic | None
    kl_control: AdaptiveKL | None
    timer: PhaseTimer
    step: int

    def __post_init__(self) -> None:
        needs_reference = self.algorithm.kl.placement is not KLPlacement.NONE
        assert needs_reference == (self.reference is not None), "a reference is built if and only if KL is paid for"
        assert self.algorithm.needs_critic == (self.critic is not None), "a critic is built if and only if it is needed"

    def learn(self, lesson: Lesson) -> tuple[Metrics, list[Sample]]:
        """Score, estimate advantages, update: the same for the same lesson, weights and step. Leaves the step's number.

        Returns what the update tells of itself, and the samples that it computed.
        """
        samples = lesson.samples
        with self.timer.phase("score"):
            old, ref, values = self._scores(samples)
        with self.timer.phase("advantage"):
            experience = build_experience(samples, old, self._algorithm_now(), ref, values, lesson.baselines)
        with self.timer.phase("score"):
            experience = self._with_old_logprobs(experience)
        with self.timer.phase("update"):
            learned = self._update(experience)
        computed = [samples[row] for row in rows_with_signal(experience, self.algorithm)]
        return {**learned, **self._kl_metrics(samples, old, ref)}, computed

    def _scores(self, samples: Sequence[Sample]) -> list[list[Tensor] | None]:
        """Old and reference log-probs and values, as far as the advantages ask for them, in one layout of packs."""
        needs_old = self.algorithm.kl.placement is KLPlacement.REWARD and self._of_trainer
        models = (self.policy if needs_old else None, self.reference, self.critic)
        layout = self.policy.laid_out(samples) if any(models) else None
        return [None if model is None or layout is None else model.score(layout) for model in models]

    def _with_old_logprobs(self, experience: Experience) -> Experience:
        """With the policy's log-probs before the first of several updates, of the samples that will be computed.

        With one optimizer step per batch the policy's own log-probs in the update are the old ones, unless tokens are
        chosen by them before it.
        """
        known = "old_logprobs" in experience.columns
        needed = self.settings.minibatches_per_step > 1 or self.algorithm.selection is not None
        if known or not needed or not self._of_trainer:
            return experience
        rows = rows_with_signal(experience, self.algorithm)
        scored = iter(self.policy.score(self.policy.laid_out([experience.samples[row] for row in rows])))
        computed = set(rows)
        return experience.having(
            "old_logprobs",
            [
                next(scored) if row in computed else torch.zeros(len(sample.token_ids))
                for row, sample in enumerate(experience.samples)
            ],
        )

    @property
    def _of_trainer(self) -> bool:
        return self.algorithm.old_logprobs is OldLogprobs.TRAINER

    def _update(self, experience: Experience) -> Metrics:
        """Critic and policy on every mini-batch."""
        of_policy, of_critic = [], []
        num_parts = self.settings.minibatches_per_step
        for number, part in enumerate(experience.split(num_parts)):
            minibatch = with_selected(part, self.algorithm, self._first_seed(num_parts) + number)
            if self.critic:
                of_critic.append(self.critic.update(minibatch))
            if self.step >= self.settings.critic_warmup:
                of_policy.append(self.policy.update(minibatch, self._algorithm_now()))
                if len(of_policy) > 1 and not self._of_trainer:  # the policy is no longer the one that was sampled from
                    of_policy[-1] = tell.of_policy_alone(of_policy[-1])
        metrics = {**tell.update_metrics("actor", of_policy), **tell.update_metrics("critic", of_critic)}
        if self.critic:
            self.critic.rest()
            metrics["critic/explained_variance"] = tell.explained_variance(experience)
        return metrics

    def _algorithm_now(self) -> Algorithm:
        """The algorithm with the KL coefficient of this moment."""
        if self.kl_control is None:
            return self.algorithm
        return replace(self.algorithm, kl=replace(self.algorithm.kl, coefficient=self.kl_control.coefficient))

    def _kl_metrics(
        self, samples: Sequence[Sample], old: Sequence[Tensor] | None, ref: Sequence[Tensor] | None
    ) -> Metrics:
        if ref is None or self.algorithm.kl.placement is not KLPlacement.REWARD:
            return {}
        sampled = [torch.tensor(sample.rollout_logprobs) for sample in samples] if old is None else old
        divergence = tell.reference_kl(samples, sampled, ref)
        coefficient = self._algorithm_now().kl.coefficient
        if self.kl_control is not None:
            self.kl_control.observe(divergence, len(samples))
        return {"kl/reference": divergence, "kl/coefficient": coefficient}

    def _first_seed(self, per_step: int) -> int:
        """The first of this step's seeds, where each step has as many."""
        return (self.settings.seed << 40) + self.step * per_step


@dataclass
class PPOTrainer(Learning):
    """Owns the step counter; everything else is given."""

    settings: StepSettings
    algorithm: Algorithm
    rollouts: Rollouts
    policy: Policy
    publisher: Publisher
    reference: Policy | None = None
    critic: Critic | None = None
    kl_control: AdaptiveKL | None = None
    meter: Meter | None = None
    timer: PhaseTimer = field(default_factory=PhaseTimer)
    step: int = 0
    groups: Sequence[TrajectoryGroup] = ()  # all that the last step drew, for metrics and transcripts
    lesson: Lesson = field(default_factory=Lesson)  # what the last step learned from, for its record

    async def train_step(self) -> Metrics:
        """One step: generate, score, learn, publish. Returns its metrics."""
        self.timer.start()
        with self.timer.phase("rollout"):
            collected = await self.rollouts.take(self.step)
            if not self._ahead:
                await self.rollouts.rollout.engine.sleep()
        self.groups = collected.drawn or collected.kept
        samples = [
            sample
            for number, group in enumerate(collected.kept)
            for sample in to_samples(group, number, self.settings.train_on_observations)
        ]
        baselines = [collected.kept[sample.group].baseline for sample in samples]
        self.lesson = Lesson(samples, baselines, self.kl_control.coefficient if self.kl_control else None)
        learned, computed = await self.beside(self.learn, self.lesson)
        with self.timer.phase("publish"):
            learned["engine/canary_gap"] = await self.publisher.publish(self.step + 1)
        self.step += 1
        return {
            **tell.rollout_metrics(self.groups),
            **tell.tool_metrics(self.groups),
            **collected.metrics(),
            **(collected.staleness_metrics() if self._ahead else {}),
            "reward/infrastructure_faults": sum(len(group.faults) for group in self.groups),
            **learned,
            **self._timings(samples, computed),
        }

    @property
    def _ahead(self) -> bool:
        """Whether rollouts go on while the policy learns."""
        return self.rollouts.settings.max_staleness > 0

    async def beside(self, work: Callable[[_Input], _Output], given: _Input) -> _Output:
        """What the ranks work out, in a thread where rollouts go on: their tools' deadlines run on meanwhile."""
        return await in_daemon(work, given) if self._ahead else work(given)

    def _timings(self, samples: Sequence[Sample], computed: Sequence[Sample]) -> Metrics:
        """computed: by the update"""
        timings = self.timer.metrics()
        used = self.meter.mfu(computed, self.policy.packing, timings["time/update_s"]) if self.meter else {}
        return {**timings, **tell.throughput(self.groups, samples, computed, timings), **used}

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold of the controller, as plain JSON."""
        coefficient = None if self.kl_control is None else self.kl_control.coefficient
        return {"step": self.step, "kl_coefficient": coefficient, "rollouts": self.rollouts.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self.step = state["step"]
        self.rollouts.restore(state["rollouts"])
        if self.kl_control is not None and state["kl_coefficient"] is not None:
            self.kl_control.coefficient = state["kl_coefficient"]
