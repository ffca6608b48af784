"""The learning half of a step, without the rollout engine: batch -> scores -> advantages -> updates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, nan

import numpy as np

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.entropy import AdaptiveEntropy
from verl.algorithms.kl import AdaptiveKL
from verl.algorithms.names import KLPlacement, OldLogprobs
from verl.batch.experience import nonzero_advantage_rows, policy_minibatch, with_advantages
from verl.batch.token_batch import Floats, Ints, TokenBatch
from verl.config.schema import Config
from verl.tracking.metric import Mean, Metric, combined
from verl.tracking.timers import PhaseTimer
from verl.trainer.metrics import Metrics, explained_variance, reference_kl, teacher_kl
from verl.trainer.not_finite import check_advantages, describe_cause, is_left_out
from verl.trainer.policy import Critic, Policy, PolicyUpdate
from verl.trainer.self_teacher import SelfTeacher
from verl.trainer.teacher_server import TeacherServer
from verl.trainer.update_plan import Deferred, UpdatePlan, plan_updates

_log = logging.getLogger(__name__)


# (policy, samples of the update, algorithm): called before every update of the policy. No advantages are deferred then.
UpdateObserver = Callable[[Policy, TokenBatch, Algorithm], None]


@dataclass(frozen=True, slots=True)
class Learned:
    """Outcome of the update on a batch."""

    metrics: Metrics
    computed: Ints  # rows with nonzero advantage, which the update computed
    batch: TokenBatch  # with its scores and advantages


@dataclass(kw_only=True)
class Learner:
    """Policy, reference, teacher and critic, and their training on a batch."""

    config: Config
    algorithm: Algorithm
    policy: Policy
    reference: Policy | None = None
    teacher: Policy | TeacherServer | SelfTeacher | None = None
    critic: Critic | None = None
    kl_control: AdaptiveKL | None = None
    entropy_control: AdaptiveEntropy | None = None
    observer: UpdateObserver | None = None
    timer: PhaseTimer = field(default_factory=PhaseTimer)

    def __post_init__(self) -> None:
        needs_reference = self.algorithm.kl.placement is not KLPlacement.NONE
        assert needs_reference == (self.reference is not None), "a reference exists if and only if KL is used"
        distills = self.algorithm.teacher_weight != 0.0
        assert distills == (self.teacher is not None), "a teacher exists if and only if it is learned from"
        assert self.algorithm.needs_critic == (self.critic is not None), "a critic exists if and only if it is needed"

    def learn(self, batch: TokenBatch, step: int, rows: Sequence[str] = ()) -> Learned:
        """Score, estimate advantages, update. Deterministic in batch, weights and step (counted from 0).

        rows: id of the data row of each group, for messages
        Raises NotFiniteError for advantages that are not finite.
        """
        observed = self.observer is not None
        plan = plan_updates(batch, self.algorithm, self.config, self.policy, step, estimates_now=observed)
        with self.timer.phase("score"):
            batch = self._with_scores(batch, plan)
        with self.timer.phase("advantage"):
            batch = with_advantages(batch, self._current_algorithm())
            computed = nonzero_advantage_rows(batch, self._current_algorithm())
            if plan.deferred is not Deferred.ADVANTAGES:
                check_advantages(batch, rows)
        with self.timer.phase("score"):
            minibatches = self._minibatches(batch, plan, computed)
        with self.timer.phase("update"):
            learned, first_logprobs = self._update(minibatches, plan)
        if first_logprobs is not None:
            batch = replace(batch, old_logprobs=batch.spread([(plan.rows[0], first_logprobs)], batch.old_logprobs))
            batch = with_advantages(batch, self._current_algorithm())
        metrics = {**learned, **self._step_metrics(batch)}
        if self.entropy_control is not None:
            metrics["actor/entropy_coefficient"] = self.entropy_control.bonus
            if isfinite(entropy := learned.get("actor/entropy", nan)):  # none if no sample was computed
                self.entropy_control.observe(entropy)
        for model in ("actor", "critic"):
            if is_left_out(metrics, model):
                cause = describe_cause(batch, self.policy, rows)
                _log.warning("step %d: an update of the %s is not finite and was left out: %s", step + 1, model, cause)
        return Learned(metrics, computed, batch)

    def _with_scores(self, batch: TokenBatch, plan: UpdatePlan) -> TokenBatch:
        """With what the advantages need of the models, on the same packs: log-probs of the policy, the reference
        and the teacher, values.

        If advantages are deferred, the old log-probs of the first mini-batch are the engine's for now.
        """
        needs_old = plan.scores_policy and self.algorithm.logprobs_in_advantages
        scores_all = needs_old and plan.deferred is Deferred.NOTHING
        top_k = self.algorithm.teacher_top_k
        models = (self.policy if scores_all else None, self.reference, None if top_k else self.teacher, self.critic)
        if not any(models) and not top_k:
            return batch
        sharding = self.policy.shard_for_scoring(batch)
        old, ref, teacher, values = (None if model is None else model.score(sharding) for model in models)
        if needs_old and not scores_all:
            old = self._old_logprobs(batch, np.arange(len(batch)), plan)
        batch = replace(batch, old_logprobs=old, ref_logprobs=ref, teacher_logprobs=teacher, values=values)
        return replace(batch, teacher_top=self.teacher.top(sharding, top_k)) if self.teacher and top_k else batch

    def _old_logprobs(self, batch: TokenBatch, rows: Ints, plan: UpdatePlan) -> Floats | None:
        """[A] the policy's log-probs before the updates, in the rows that are not deferred; the engine's elsewhere."""
        if plan.deferred is not Deferred.NOTHING:
            rows = np.setdiff1d(rows, plan.rows[0])
        scored = [(rows, self.policy.score(self.policy.shard_for_scoring(batch.rows(rows))))] if len(rows) else []
        return batch.spread(scored, batch.rollout_logprobs)

    def _minibatches(self, batch: TokenBatch, plan: UpdatePlan, computed: Ints) -> list[TokenBatch]:
        """With old log-probs of the computed rows; the first mini-batch without what its update computes."""
        old = batch.old_logprobs
        if old is None and plan.scores_policy:
            old = self._old_logprobs(batch, computed, plan)
        first, *later = (replace(batch, old_logprobs=old).rows(rows) for rows in plan.rows)
        if plan.deferred is not Deferred.NOTHING:
            first = replace(first, old_logprobs=None)
        if plan.deferred is Deferred.ADVANTAGES:
            first = replace(first, advantages=None)
        return [first, *later]

    def _update(self, minibatches: Sequence[TokenBatch], plan: UpdatePlan) -> tuple[Metrics, Floats | None]:
        """Update critic and policy on every mini-batch in every epoch.

        Returns the metrics, and the log-probs [A] of the first mini-batch if its advantages were deferred.
        """
        policy_updates: list[PolicyUpdate] = []
        critic_updates: list[dict[str, Metric]] = []
        for number, minibatch in enumerate([*minibatches] * plan.epochs):
            if self.critic:
                critic_updates.append(self.critic.update(minibatch))
            if plan.trains_policy:
                algorithm = self._current_algorithm()
                computed = policy_minibatch(minibatch, algorithm, plan.first_seed + number, self.policy.entropies)
                # With the engine's old log-probs, only the first update sees the policy that has sampled.
                compare_engine = algorithm.old_logprobs is OldLogprobs.TRAINER or not policy_updates
                if self.observer is not None:
                    self.observer(self.policy, computed, algorithm)
                update = self.policy.update(computed, algorithm, compare_engine)
                update.metrics["actor/computed_share"] = Mean(len(computed) / len(minibatch))
                policy_updates.append(update)
        if self.critic:
            self.critic.offload()
        metrics = {**combined([each.metrics for each in policy_updates]), **combined(critic_updates)}
        return metrics, policy_updates[0].logprobs if policy_updates else None

    @property
    def coefficients(self) -> dict[str, float]:
        """The state of the adaptive controllers, empty without any."""
        found = {} if self.kl_control is None else {"kl": self.kl_control.coefficient}
        if self.entropy_control is not None:
            found |= {"entropy": self.entropy_control.coefficient, "entropy_bonus": self.entropy_control.bonus}
        return found

    def restore(self, coefficients: Mapping[str, float]) -> None:
        """The controllers' state from `coefficients`; one that has none there begins anew."""
        if self.kl_control is not None and "kl" in coefficients:
            self.kl_control.coefficient = coefficients["kl"]
        if self.entropy_control is not None and "entropy" in coefficients:
            self.entropy_control.coefficient = coefficients["entropy"]
            self.entropy_control.bonus = coefficients["entropy_bonus"]

    def _current_algorithm(self) -> Algorithm:
        """With the coefficients that the controllers have set."""
        algorithm = self.algorithm
        if self.kl_control is not None:
            algorithm = replace(algorithm, kl=replace(algorithm.kl, coefficient=self.kl_control.coefficient))
        if self.entropy_control is not None:
            algorithm = replace(algorithm, entropy_coefficient=self.entropy_control.bonus)
        return algorithm

    def _step_metrics(self, batch: TokenBatch) -> Metrics:
        """Metrics of the step's batch: the critic's fit, and the KL divergence, which the KL controller observes."""
        metrics: Metrics = {}
        if self.critic:
            metrics["critic/explained_variance"] = explained_variance(batch)
        if self.algorithm.teacher_in_advantages:
            metrics["kl/teacher"] = teacher_kl(batch)
        if batch.num_hints is not None:
            metrics["kl/demonstrated"] = float((batch.num_hints > 0).mean())
        if self.algorithm.kl.placement is KLPlacement.REWARD:
            divergence = reference_kl(batch, self.algorithm.kl.estimator)
            metrics["kl/reference"] = divergence
            metrics["kl/coefficient"] = self._current_algorithm().kl.coefficient
            if self.kl_control is not None:
                self.kl_control.observe(divergence, len(batch.episode_bounds) - 1)
        return metrics
