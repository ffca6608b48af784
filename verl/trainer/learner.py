"""The learning half of a step, without the rollout engine: samples -> scores -> advantages -> updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.kl import AdaptiveKL
from verl.algorithms.names import KLPlacement, OldLogprobs
from verl.batch.experience import Experience, build_experience, nonzero_advantage_rows, with_selected
from verl.batch.train_batch import TrainBatch
from verl.tracking.timers import PhaseTimer
from verl.trainer.metrics import Metrics, explained_variance, reference_kl, update_metrics, without_engine_metrics
from verl.trainer.policy import Critic, Policy
from verl.types import Sample


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The batch arithmetic of a step."""

    minibatches_per_step: int = 1
    epochs: int = 1  # passes over the mini-batches
    critic_warmup: int = 0  # initial steps that update only the critic
    train_on_observations: bool = False  # also on the environment's tokens
    seed: int = 0


@dataclass
class Learner:
    """Policy, reference and critic, and their training on a batch."""

    settings: StepSettings
    algorithm: Algorithm
    policy: Policy
    reference: Policy | None = None
    critic: Critic | None = None
    kl_control: AdaptiveKL | None = None
    timer: PhaseTimer = field(default_factory=PhaseTimer)

    def __post_init__(self) -> None:
        needs_reference = self.algorithm.kl.placement is not KLPlacement.NONE
        assert needs_reference == (self.reference is not None), "a reference exists if and only if KL is used"
        assert self.algorithm.needs_critic == (self.critic is not None), "a critic exists if and only if it is needed"

    def learn(self, train_batch: TrainBatch, step: int) -> tuple[Metrics, list[Sample]]:
        """Score, estimate advantages, update. Deterministic in batch, weights and step (counted from 0).

        Returns the update's metrics, and the samples with nonzero advantage, which it computed.
        """
        samples = train_batch.samples
        with self.timer.phase("score"):
            old, ref, values = self._scores(samples)
        with self.timer.phase("advantage"):
            experience = build_experience(samples, old, self._current_algorithm(), ref, values, train_batch.baselines)
        with self.timer.phase("score"):
            experience = self._with_old_logprobs(experience)
        with self.timer.phase("update"):
            learned = self._update(experience, step)
        computed = [samples[row] for row in nonzero_advantage_rows(experience, self.algorithm)]
        return {**learned, **self._kl_metrics(samples, old, ref)}, computed

    def _scores(self, samples: Sequence[Sample]) -> list[list[Tensor] | None]:
        """Old and reference log-probs and values, if the advantages need them, on the same packs."""
        needs_old = self.algorithm.kl.placement is KLPlacement.REWARD and self._needs_old_pass
        models = (self.policy if needs_old else None, self.reference, self.critic)
        layout = self.policy.pack_for_scoring(samples) if any(models) else None
        return [None if model is None or layout is None else model.score(layout) for model in models]

    def _with_old_logprobs(self, experience: Experience) -> Experience:
        """Adds the policy's log-probs before the first update, for the samples with nonzero advantage, if needed."""
        if "old_logprobs" in experience.columns or not self._needs_old_pass:
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
    def _needs_old_pass(self) -> bool:
        return self.algorithm.needs_old_pass(self.settings.minibatches_per_step * self.settings.epochs)

    def _update(self, experience: Experience, step: int) -> Metrics:
        """Update critic and policy on every mini-batch in every epoch."""
        policy_updates, critic_updates = [], []
        num_parts, epochs = self.settings.minibatches_per_step, self.settings.epochs
        first_seed = (self.settings.seed << 40) + step * num_parts * epochs
        parts = [part for _ in range(epochs) for part in experience.split(num_parts)]
        for number, part in enumerate(parts):
            minibatch = with_selected(part, self.algorithm, first_seed + number)
            if self.critic:
                critic_updates.append(self.critic.update(minibatch))
            if step >= self.settings.critic_warmup:
                policy_updates.append(self.policy.update(minibatch, self._current_algorithm()))
                # From the second update on, the policy is not the one that sampled.
                if len(policy_updates) > 1 and self.algorithm.old_logprobs is OldLogprobs.ROLLOUT:
                    policy_updates[-1] = without_engine_metrics(policy_updates[-1])
        metrics = {**update_metrics("actor", policy_updates), **update_metrics("critic", critic_updates)}
        if self.critic:
            self.critic.offload()
            metrics["critic/explained_variance"] = explained_variance(experience)
        return metrics

    def _current_algorithm(self) -> Algorithm:
        """The algorithm with the current KL coefficient."""
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
        coefficient = self._current_algorithm().kl.coefficient
        if self.kl_control is not None:
            self.kl_control.observe(divergence, len(samples))
        return {"kl/reference": divergence, "kl/coefficient": coefficient}
