"""The updates of a step, decided before its first one: their mini-batches, and what the first one computes itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.names import OldLogprobs
from verl.batch.token_batch import Ints, TokenBatch
from verl.config.schema import Config
from verl.trainer.policy import Policy


class Deferred(Enum):
    """What is computed for the first mini-batch by its update, not by a pass before it; until then the field is None.

    The update computes the log-probs of the policy anyway; detached, they are the old ones.
    """

    NOTHING = auto()
    OLD_LOGPROBS = auto()
    ADVANTAGES = auto()  # old log-probs, and advantages, which need them with KL in the reward or a teacher


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    rows: Sequence[Ints]  # rows of each mini-batch
    epochs: int
    first_seed: int  # for token selection in the first update; the next ones count up
    trains_policy: bool  # False: the critic alone is trained
    scores_policy: bool  # whether the policy scores the step's samples, except for those that are deferred
    deferred: Deferred


def plan_updates(
    batch: TokenBatch, algorithm: Algorithm, config: Config, policy: Policy, step: int, estimates_now: bool = False
) -> UpdatePlan:
    """step: counted from 0; estimates_now: whether to defer no advantages"""
    number, epochs = config.minibatches_per_step, config.actor.ppo_epochs
    rows = list(batch.minibatch_rows(number))
    trains_policy = step >= config.trainer.critic_only_updates
    in_advantages = algorithm.logprobs_in_advantages
    scores_policy = algorithm.old_logprobs is OldLogprobs.TRAINER and (trains_policy or in_advantages)
    deferred = Deferred.NOTHING
    if trains_policy and scores_policy and algorithm.old_pass_share(number, epochs) < 1.0:
        deferred = Deferred.ADVANTAGES if in_advantages else Deferred.OLD_LOGPROBS
    if deferred is Deferred.ADVANTAGES and (estimates_now or not policy.can_estimate(batch.rows(rows[0]))):
        deferred = Deferred.NOTHING
    return UpdatePlan(
        rows=rows,
        epochs=epochs,
        first_seed=(config.trainer.seed << 40) + step * number * epochs,
        trains_policy=trains_policy,
        scores_policy=scores_policy,
        deferred=deferred,
    )
