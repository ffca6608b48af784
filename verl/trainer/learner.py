"""The learning half of a step, which needs no engine: samples -> scores -> advantages -> updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from verl.algorithms.algorithm import Algorithm, KLPlacement, OldLogprobs
from verl.algorithms.kl import AdaptiveKL
from verl.tracking.timers import PhaseTimer
from verl.trainer.experience import Experience, build_experience, nonzero_advantage_rows, with_selected
from verl.trainer.metrics import Metrics, explained_variance, of_policy_alone, reference_kl, update_metrics
from verl.trainer.policy import Critic, Policy
from verl.trainer.record import TrainBatch
from verl.types import Sample


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The batch arithmetic of a step."""

    minibatches_per_step: int = 1
    epochs: int = 1  # passes over them
    critic_warmup: int = 0  # first steps, in which the critic alone learns
    train_on_observations: bool = False  # on what the environment said, too
    seed: int = 0


@dataclass
class Learner:
    """Policy, reference and critic, and how they learn."""

    settings: StepSettings
    algorithm: Algorithm
    policy: Policy
    reference: Policy | None = None
    critic: Critic | None = None
    kl_control: AdaptiveKL | None = None
    timer: PhaseTimer = field(default_factory=PhaseTimer)

    def __post_init__(self) -> None:
        needs_reference = self.algorithm.kl.placement is not KLPlacement.NONE
        assert needs_reference == (self.reference is not None), "a reference is built if and only if KL is paid for"
        assert self.algorithm.needs_critic == (self.critic is not None), "a critic is built if and only if it is needed"

    def learn(self, train_batch: TrainBatch, step: int) -> tuple[Metrics, list[Sample]]:
        """Score, estimate advantages, update: the same for the same train_batch, weights and step, the first of which is 0.

        Returns what the update tells of itself, and the samples that it computed.
        """
        samples = train_batch.samples
        with self.timer.phase("score"):
            old, ref, values = self._scores(samples)
        with self.timer.phase("advantage"):
            experience = build_experience(samples, old, self._algorithm_now(), ref, values, train_batch.baselines)
        with self.timer.phase("score"):
            experience = self._with_old_logprobs(experience)
        with self.timer.phase("update"):
            learned = self._update(experience, step)
        computed = [samples[row] for row in nonzero_advantage_rows(experience, self.algorithm)]
        return {**learned, **self._kl_metrics(samples, old, ref)}, computed

    def _scores(self, samples: Sequence[Sample]) -> list[list[Tensor] | None]:
        """Old and reference log-probs and values, as far as the advantages ask for them, in one layout of packs."""
        needs_old = self.algorithm.kl.placement is KLPlacement.REWARD and self._of_trainer
        models = (self.policy if needs_old else None, self.reference, self.critic)
        layout = self.policy.pack_for_scoring(samples) if any(models) else None
        return [None if model is None or layout is None else model.score(layout) for model in models]

    def _with_old_logprobs(self, experience: Experience) -> Experience:
        """With the policy's log-probs before the first of several updates, of the samples that will be computed.

        With one optimizer step per batch the policy's own log-probs in the update are the old ones, unless tokens are
        chosen by them before it.
        """
        known = "old_logprobs" in experience.columns
        settings = self.settings
        needed = settings.minibatches_per_step * settings.epochs > 1 or self.algorithm.selection is not None
        if known or not needed or not self._of_trainer:
            return experience
        rows = nonzero_advantage_rows(experience, self.algorithm)
        scored = iter(self.policy.score(self.policy.pack_for_scoring([experience.samples[row] for row in rows])))
        computed = set(rows)
        return experience.with_column(
            "old_logprobs",
            [
                next(scored) if row in computed else torch.zeros(len(sample.token_ids))
                for row, sample in enumerate(experience.samples)
            ],
        )

    @property
    def _of_trainer(self) -> bool:
        return self.algorithm.old_logprobs is OldLogprobs.TRAINER

    def _update(self, experience: Experience, step: int) -> Metrics:
        """Critic and policy on every mini-batch, as often as there are epochs."""
        of_policy, of_critic = [], []
        num_parts, epochs = self.settings.minibatches_per_step, self.settings.epochs
        first_seed = (self.settings.seed << 40) + step * num_parts * epochs
        parts = [part for _ in range(epochs) for part in experience.split(num_parts)]
        for number, part in enumerate(parts):
            minibatch = with_selected(part, self.algorithm, first_seed + number)
            if self.critic:
                of_critic.append(self.critic.update(minibatch))
            if step >= self.settings.critic_warmup:
                of_policy.append(self.policy.update(minibatch, self._algorithm_now()))
                if len(of_policy) > 1 and not self._of_trainer:  # the policy is no longer the one that was sampled from
                    of_policy[-1] = of_policy_alone(of_policy[-1])
        metrics = {**update_metrics("actor", of_policy), **update_metrics("critic", of_critic)}
        if self.critic:
            self.critic.offload()
            metrics["critic/explained_variance"] = explained_variance(experience)
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
        divergence = reference_kl(samples, sampled, ref, self.algorithm.kl.estimator)
        coefficient = self._algorithm_now().kl.coefficient
        if self.kl_control is not None:
            self.kl_control.observe(divergence, len(samples))
        return {"kl/reference": divergence, "kl/coefficient": coefficient}
