"""The learning half of a step, without the rollout engine: batch -> scores -> advantages -> updates."""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.kl import AdaptiveKL
from verl.algorithms.names import KLPlacement, OldLogprobs
from verl.batch.experience import nonzero_advantage_rows, with_advantages, with_selected
from verl.batch.token_batch import Floats, Ints, TokenBatch
from verl.batch.trace import Trace, joined_updates
from verl.config.schema import Config
from verl.tracking.metric import Metric, combined
from verl.tracking.timers import PhaseTimer
from verl.trainer.metrics import Metrics, explained_variance, reference_kl
from verl.trainer.not_finite import check_advantages, describe_cause, is_left_out
from verl.trainer.policy import Critic, Policy

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Learned:
    """Outcome of the update on a batch."""

    metrics: Metrics
    computed: Ints  # rows with nonzero advantage, which the update computed
    batch: TokenBatch  # with its scores and advantages
    trace: Trace


@dataclass(kw_only=True)
class Learner:
    """Policy, reference and critic, and their training on a batch."""

    config: Config
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

    def learn(
        self, batch: TokenBatch, step: int, traced: Container[int] | None = None, rows: Sequence[str] = ()
    ) -> Learned:
        """Score, estimate advantages, update. Deterministic in batch, weights and step (counted from 0).

        traced: rows of the batch whose tokens are traced; None: no trace
        rows: id of the data row of each group, for messages
        Raises NotFiniteError for advantages that are not finite.
        """
        with self.timer.phase("score"):
            batch = self._with_scores(batch, step)
        with self.timer.phase("advantage"):
            batch = with_advantages(batch, self._current_algorithm())
            check_advantages(batch, rows)
        with self.timer.phase("score"):
            batch = self._with_old_logprobs(batch)
        with self.timer.phase("update"):
            if traced is not None:
                batch = replace(batch, numbers=np.arange(len(batch)))
            computed = nonzero_advantage_rows(batch, self.algorithm)
            learned, trace, batch = self._update(batch, step, traced)
        metrics = {**learned, **self._kl_metrics(batch)}
        for model in ("actor", "critic"):
            if is_left_out(metrics, model):
                cause = describe_cause(batch, self.policy, rows)
                _log.warning("step %d: an update of the %s is not finite and was left out: %s", step + 1, model, cause)
        return Learned(metrics, computed, batch, trace)

    def _with_scores(self, batch: TokenBatch, step: int) -> TokenBatch:
        """With old and reference log-probs and values, if the advantages need them, on the same packs.

        Old log-probs are NaN in the first mini-batch, if its update computes them and the advantages with them.
        """
        trainers = self.algorithm.old_logprobs is OldLogprobs.TRAINER
        needs_old = trainers and self.algorithm.kl.placement is KLPlacement.REWARD
        rest = self._rows_after_first(batch, step) if needs_old else None
        models = (self.policy if needs_old and rest is None else None, self.reference, self.critic)
        if not any(models):
            return batch
        sharding = self.policy.shard_for_scoring(batch)
        old, ref, values = (None if model is None else model.score(sharding) for model in models)
        if rest is not None:
            scored = [(rest, self.policy.score(self.policy.shard_for_scoring(batch.rows(rest))))] if len(rest) else []
            old = batch.spread(scored)
        return replace(batch, old_logprobs=old, ref_logprobs=ref, values=values)

    def _rows_after_first(self, batch: TokenBatch, step: int) -> Ints | None:
        """Rows whose old log-probs need a pass, if the first mini-batch's update estimates its own advantages."""
        if self._old_pass_share == 1.0 or not self._trains_policy(step):
            return None
        first = next(batch.minibatch_rows(self.config.minibatches_per_step))
        return np.setdiff1d(np.arange(len(batch)), first) if self.policy.can_estimate(batch.rows(first)) else None

    def _with_old_logprobs(self, batch: TokenBatch) -> TokenBatch:
        """With the policy's log-probs before the first update, for the samples with nonzero advantage, if needed.

        NaN where they are not computed: in the first mini-batch, if its update computes them.
        """
        if batch.old_logprobs is not None or not self._old_pass_share:
            return batch
        rows = nonzero_advantage_rows(batch, self.algorithm)
        if self._old_pass_share < 1.0:
            rows = np.setdiff1d(rows, next(batch.minibatch_rows(self.config.minibatches_per_step)))
        if not len(rows):
            return batch
        scored = self.policy.score(self.policy.shard_for_scoring(batch.rows(rows)))
        return replace(batch, old_logprobs=batch.spread([(rows, scored)]))

    @property
    def _old_pass_share(self) -> float:
        return self.algorithm.old_pass_share(self.config.minibatches_per_step, self.config.actor.ppo_epochs)

    def _update(self, batch: TokenBatch, step: int, traced: Container[int] | None) -> tuple[Metrics, Trace, TokenBatch]:
        """Update critic and policy on every mini-batch in every epoch. Returns the batch with all its advantages."""
        policy_updates: list[dict[str, Metric]] = []
        critic_updates: list[dict[str, Metric]] = []
        traces: list[Trace] = []
        num_parts = self.config.minibatches_per_step
        epochs = self.config.actor.ppo_epochs
        first_seed = (self.config.trainer.seed << 40) + step * num_parts * epochs
        parts = (part for _ in range(epochs) for part in batch.split(num_parts))
        for number, part in enumerate(parts):
            minibatch = with_selected(part, self.algorithm, first_seed + number)
            if self.critic:
                critic_updates.append(self.critic.update(minibatch))
            if self._trains_policy(step):
                # With the engine's old log-probs, only the first update sees the policy that has sampled.
                compare_engine = self.algorithm.old_logprobs is OldLogprobs.TRAINER or not policy_updates
                algorithm = self._current_algorithm()
                updated, trace, logprobs = self.policy.traced_update(minibatch, algorithm, compare_engine, traced)
                policy_updates.append(updated)
                traces.append(trace)
                if logprobs is not None:
                    batch = self._completed(batch, logprobs)
        metrics = {**combined(policy_updates), **combined(critic_updates)}
        if self.critic:
            self.critic.offload()
            metrics["critic/explained_variance"] = explained_variance(batch)
        return metrics, joined_updates(traces), batch

    def _trains_policy(self, step: int) -> bool:
        """Whether the update after `step` others is not one of the critic's alone."""
        return step >= self.config.trainer.critic_only_updates

    def _completed(self, batch: TokenBatch, first: Floats) -> TokenBatch:
        """With the old log-probs of the first mini-batch, and the advantages that its update estimated with them."""
        assert batch.old_logprobs is not None
        rows = next(batch.minibatch_rows(self.config.minibatches_per_step))
        found = batch.spread([(rows, first)])
        batch = replace(batch, old_logprobs=np.where(np.isnan(batch.old_logprobs), found, batch.old_logprobs))
        return with_advantages(batch, self._current_algorithm())

    def _current_algorithm(self) -> Algorithm:
        if self.kl_control is None:
            return self.algorithm
        return replace(self.algorithm, kl=replace(self.algorithm.kl, coefficient=self.kl_control.coefficient))

    def _kl_metrics(self, batch: TokenBatch) -> Metrics:
        """Of the KL penalty in the reward; its controller observes the divergence."""
        if self.algorithm.kl.placement is not KLPlacement.REWARD:
            return {}
        divergence = reference_kl(batch, self.algorithm.kl.estimator)
        coefficient = self._current_algorithm().kl.coefficient
        if self.kl_control is not None:
            self.kl_control.observe(divergence, len(batch.episode_bounds) - 1)
        return {"kl/reference": divergence, "kl/coefficient": coefficient}
