"""What is decided before the updates of a step."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.verl.trainer.test_train_step import sample
from verl.algorithms.algorithm import Algorithm, KLTerm
from verl.algorithms.estimators.grpo import GRPO
from verl.algorithms.estimators.reinforce_pp import REINFORCE_PP
from verl.algorithms.losses.clip_cov import CLIP_COV
from verl.algorithms.names import KLPlacement, OldLogprobs
from verl.batch.samples import batch_of
from verl.config.schema import ActorConfig, Config, DataConfig, TrainerConfig
from verl.trainer.update_plan import Deferred, UpdatePlan, plan_updates

PLAIN = replace(GRPO, kl=KLTerm())
IN_REWARD = KLTerm(KLPlacement.REWARD, "k1", 0.5)
BATCH = batch_of([sample((False, True), 0.0, group) for group in (0, 0, 1, 1, 2, 2, 3, 3)])


def plan(
    algorithm: Algorithm, epochs: int = 1, warmup: int = 0, by_pack: bool = True, estimates_now: bool = False
) -> UpdatePlan:
    config = Config(
        data=DataConfig(train_batch_size=4),
        actor=ActorConfig(ppo_mini_batch_size=2, ppo_epochs=epochs),
        trainer=TrainerConfig(critic_warmup=warmup),
    )
    policy: Any = SimpleNamespace(can_estimate=lambda minibatch: by_pack)
    return plan_updates(BATCH, algorithm, config, policy, 0, estimates_now)


@pytest.mark.parametrize(
    ("algorithm", "settings", "deferred"),
    [
        (PLAIN, {}, Deferred.OLD_LOGPROBS),
        (PLAIN, {"epochs": 2}, Deferred.NOTHING),
        (replace(PLAIN, old_logprobs=OldLogprobs.ROLLOUT), {}, Deferred.NOTHING),
        (replace(PLAIN, kl=IN_REWARD), {}, Deferred.ADVANTAGES),
        (replace(PLAIN, kl=IN_REWARD), {"by_pack": False}, Deferred.NOTHING),
        (replace(PLAIN, kl=IN_REWARD), {"estimates_now": True}, Deferred.NOTHING),
        (replace(PLAIN, kl=IN_REWARD), {"warmup": 2}, Deferred.NOTHING),
        (replace(PLAIN, kl=IN_REWARD, old_logprobs=OldLogprobs.ROLLOUT), {}, Deferred.NOTHING),
        (replace(REINFORCE_PP, kl=IN_REWARD), {}, Deferred.NOTHING),  # whitened over the whole batch
        (replace(CLIP_COV, kl=KLTerm()), {}, Deferred.NOTHING),  # selects tokens before the update
    ],
)
def test_a_first_update_fills_in_what_nothing_needs_before(
    algorithm: Algorithm, settings: dict[str, Any], deferred: Deferred
) -> None:
    made = plan(algorithm, **settings)
    assert made.deferred is deferred
    assert [rows.tolist() for rows in made.rows] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_the_policy_scores_only_what_an_update_or_the_reward_needs() -> None:
    assert plan(PLAIN).scores_policy and not plan(PLAIN, warmup=2).scores_policy
    assert plan(replace(PLAIN, kl=IN_REWARD), warmup=2).scores_policy
    assert not plan(replace(PLAIN, old_logprobs=OldLogprobs.ROLLOUT)).scores_policy
