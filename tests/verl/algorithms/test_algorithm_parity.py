"""Advantages, losses, KL and aggregation against arrays that veRL 0.9.1's own functions gave on one batch.

Arrays without a counterpart: `loss/dro` (an algorithm that is not here), KL "abs" and the "+" estimators, `balance/*`
(packs here are filled by capacity). `stats/entropy*` is tested where logits are.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.conftest import real_data
from tests.verl.algorithms.test_algorithm_family import selection_of
from verl.algorithms.aggregate import episode_weights
from verl.algorithms.correction import Correction, token_weights
from verl.algorithms.estimators.advantage import (
    AdvantageEstimator,
    AdvantageInputs,
    gae,
    grpo,
    whitened,
)
from verl.algorithms.estimators.dr_grpo import group_centered
from verl.algorithms.estimators.gdpo import gdpo
from verl.algorithms.estimators.gpg import gpg
from verl.algorithms.estimators.opo import opo
from verl.algorithms.estimators.pass_at_k import pass_at_k
from verl.algorithms.estimators.reinforce_pp import reinforce_pp
from verl.algorithms.estimators.reinforce_pp_baseline import reinforce_pp_baseline
from verl.algorithms.estimators.remax import remax
from verl.algorithms.estimators.rloo import rloo
from verl.algorithms.kl import KL_ESTIMATORS, apply_kl_penalty
from verl.algorithms.losses.cispo import weight_clipped
from verl.algorithms.losses.clip_cov import clipped_unless_selected
from verl.algorithms.losses.dppo_kl import within_binary_kl
from verl.algorithms.losses.dppo_tv import within_total_variation
from verl.algorithms.losses.gmpo import geometric_mean
from verl.algorithms.losses.gspo import sequence_clipped
from verl.algorithms.losses.kl_cov import largest, penalty_where_selected
from verl.algorithms.losses.policy_loss import LossInputs, PolicyLoss, TokenLoss, clipped, covariances, policy_gradient
from verl.algorithms.losses.ppo import clipped_value_loss
from verl.algorithms.losses.sapo import soft_gated
from verl.algorithms.names import Aggregation, KLEstimate, Level


class Published:
    """veRL 0.9.1's outputs on one batch; rows x tokens are flattened to trained tokens, as ours are."""

    def __init__(self) -> None:
        with np.load(real_data("parity", "algorithms.npz")) as arrays:
            self.arrays = {name: torch.from_numpy(arrays[name]) for name in arrays.files if name != "meta"}
        self.mask = self.arrays["in/mask"].bool()

    def __getitem__(self, name: str) -> Tensor:
        array = self.arrays[name]
        return array[self.mask] if array.shape == self.mask.shape else array

    def rows(self, name: str) -> list[Tensor]:
        return [row[kept] for row, kept in zip(self.arrays[name], self.mask, strict=True)]


@pytest.fixture(scope="module")
def published() -> Published:
    return Published()


def assert_close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got.to(wanted.dtype), wanted, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def batch(published: Published) -> AdvantageInputs:
    return AdvantageInputs(
        published.rows("in/rewards"), published["in/index"], published.rows("in/values"), published["in/baselines"]
    )


@pytest.mark.parametrize(
    ("name", "estimate"),
    [
        ("grpo", grpo),
        ("grpo_vectorized", grpo),
        ("dr_grpo", group_centered),
        ("reinforce_pp", reinforce_pp),
        ("reinforce_pp_g0.9", partial(reinforce_pp, gamma=0.9)),
        ("reinforce_pp_baseline", reinforce_pp_baseline),
        ("rloo", rloo),
        ("remax", remax),
        ("opo", opo),
        ("gdpo_single", gdpo),
    ],
)
def test_advantages_equal_verls(
    published: Published, batch: AdvantageInputs, name: str, estimate: AdvantageEstimator
) -> None:
    assert_close(torch.cat(estimate(batch).advantages), published[f"adv/{name}/advantages"])


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95)])
def test_gae_equals_verls(published: Published, batch: AdvantageInputs, gamma: float, lam: float) -> None:
    got = gae(batch, gamma, lam)
    assert got.returns is not None
    assert_close(torch.cat(got.advantages), published[f"adv/gae_g{gamma:g}_l{lam:g}/advantages"])
    assert_close(torch.cat(got.returns), published[f"adv/gae_g{gamma:g}_l{lam:g}/returns"])


def test_verls_other_rloo_differs_in_groups_of_one_alone(published: Published, batch: AdvantageInputs) -> None:
    """It gives them 0, where its first form and ours let the reward stand."""
    alone_B = torch.tensor([int((batch.group_B == group).sum()) == 1 for group in batch.group_B])
    assert alone_B.any()
    got = [torch.zeros_like(row) if alone else row for row, alone in zip(rloo(batch).advantages, alone_B, strict=True)]
    assert_close(torch.cat(got), published["adv/rloo_vectorized/advantages"])


def test_gpg_differs_from_verls_by_a_factor(published: Published, batch: AdvantageInputs) -> None:
    """veRL divides by the rewards that are not 0; the paper by the responses in groups whose rewards differ (20 of 25;
    the group of one, whose reward stands, is the 21st)."""
    num_nonzero = int((batch.rewards != 0).sum())
    assert_close(torch.cat(gpg(batch).advantages) * 21 / num_nonzero, published["adv/gpg/advantages"])


@pytest.mark.parametrize(("suffix", "divide"), [("", True), ("_nostd", False)])
def test_pass_at_k_equals_verls(published: Published, suffix: str, divide: bool) -> None:
    """veRL refuses groups of one, so that its arrays are of the others."""
    whole = published.arrays["in/whole_groups"]
    rows, masks = published.rows("in/rewards"), published.mask[whole]
    part = AdvantageInputs([rows[int(row)] for row in whole], published["in/index"][whole])
    wanted = published.arrays[f"adv/grpo_passk{suffix}/advantages"][masks]
    assert_close(torch.cat(pass_at_k(part, divide_by_std=divide).advantages), wanted)


def test_whitening_equals_verls(published: Published) -> None:
    rows = published.rows("in/loss_mat")
    assert_close(torch.cat(whitened(rows).advantages), published["stats/masked_whiten"])


def inputs_of(published: Published, selected_T: Tensor | None = None) -> LossInputs:
    logprobs_T = published["in/logp"].clone().requires_grad_()
    sample_T = torch.repeat_interleave(torch.arange(len(published.mask)), published.mask.sum(1))
    return LossInputs(logprobs_T, published["in/old"], published["in/advantages"], sample_T, selected_T)


def check_loss(
    published: Published,
    name: str,
    loss: PolicyLoss,
    mode: Aggregation = Aggregation.TOKEN_MEAN,
    selected_T: Tensor | None = None,
    scale: float = 1.0,
) -> None:
    """Value and gradient of the aggregated loss, and the metrics that veRL reports, are veRL's."""
    inputs = inputs_of(published, selected_T)
    token = loss(inputs)
    lengths = published.mask.sum(1)
    weights_T = torch.repeat_interleave(episode_weights(mode, lengths, constant_length=24).float(), lengths)
    total = (token.loss_T * weights_T).sum() * scale
    total.backward()
    assert inputs.logprobs_T.grad is not None
    assert_close(total.detach(), published[f"loss/{name}/value"])
    assert_close(inputs.logprobs_T.grad, published[f"loss/{name}/grad"])
    for theirs, ours in (("pg_clipfrac", "clip_fraction"), ("ppo_kl", "ppo_kl")):
        if ours in token.metrics_T and f"loss/{name}/metric/{theirs}" in published.arrays:
            assert_close(token.metrics_T[ours].mean(), published[f"loss/{name}/metric/{theirs}"])


@pytest.mark.parametrize("mode", Aggregation)
def test_clipped_loss_equals_verls_in_every_aggregation(published: Published, mode: Aggregation) -> None:
    check_loss(published, f"vanilla/{mode}", partial(clipped, dual_clip=3.0), mode)


def test_global_denominators_are_a_factor(published: Published) -> None:
    """veRL gets 777 tokens and 64 samples in all and undoes the mean over 2 ranks; this batch has 366 and 24."""
    lengths = published.mask.sum(1)
    tokens, samples = int(lengths.sum()), int((lengths > 0).sum())
    loss = partial(clipped, dual_clip=3.0)
    check_loss(published, "vanilla_global/token-mean", loss, scale=2 * tokens / 777)
    mode = Aggregation.SEQ_MEAN_TOKEN_MEAN
    check_loss(published, f"vanilla_global/{mode}", loss, mode, scale=2 * samples / 64)


SEQ_MEAN = Aggregation.SEQ_MEAN_TOKEN_MEAN


@pytest.mark.parametrize(
    ("name", "loss", "mode"),
    [
        ("clip_higher", partial(clipped, clip_high=0.28, dual_clip=3.0), Aggregation.TOKEN_MEAN),
        ("dual_clip_c1.5", partial(clipped, dual_clip=1.5), Aggregation.TOKEN_MEAN),
        ("gspo", partial(sequence_clipped, clip_low=0.03, clip_high=0.04), SEQ_MEAN),
        ("gspo_token-mean", partial(sequence_clipped, clip_low=0.03, clip_high=0.04), Aggregation.TOKEN_MEAN),
        ("cispo", partial(weight_clipped, clip_low=1.0, clip_high=0.28), Aggregation.TOKEN_MEAN),
        ("sapo", soft_gated, SEQ_MEAN),
        ("gpg", policy_gradient, Aggregation.TOKEN_MEAN),
        ("dppo_tv", within_total_variation, Aggregation.TOKEN_MEAN),
        ("dppo_kl", within_binary_kl, Aggregation.TOKEN_MEAN),
    ],
)
def test_losses_equal_verls(published: Published, name: str, loss: PolicyLoss, mode: Aggregation) -> None:
    check_loss(published, name, loss, mode)


@pytest.mark.parametrize("level", [Level.TOKEN, Level.SEQUENCE])
def test_importance_weights_equal_verls(published: Published, level: Level) -> None:
    sample_T = torch.repeat_interleave(torch.arange(len(published.mask)), published.mask.sum(1))
    got = token_weights(Correction(level), published["in/old"], published["in/sampler"], sample_T)
    assert_close(got.weight_T, published[f"is/{level}/weights"])


def test_a_weighted_loss_equals_verls(published: Published) -> None:
    def loss(inputs: LossInputs) -> TokenLoss:
        token = clipped(inputs, dual_clip=3.0)
        return TokenLoss(token.loss_T * published["in/rollout_is_weights"], token.metrics_T)

    check_loss(published, "vanilla_is/token-mean", loss)


def test_gmpo_differs_from_verls_by_rows_without_tokens(published: Published) -> None:
    """veRL divides by all rows; its clip fraction counts tokens that the pessimistic side lets through, too."""
    rows, samples = len(published.mask), int(published.mask.any(1).sum())
    assert rows == samples + 1

    def loss(inputs: LossInputs) -> TokenLoss:
        return TokenLoss(geometric_mean(inputs).loss_T, {})

    check_loss(published, "gmpo", loss, SEQ_MEAN, scale=samples / rows)


def test_kl_cov_equals_verls(published: Published) -> None:
    """The choice from the log-probs that veRL chooses by, which are those of the update."""
    chosen_T = largest(selection_of(published["in/logp"], published["in/advantages"]), share=0.05)
    inputs = inputs_of(published)
    absolute = (inputs.logprobs_T - inputs.old_logprobs_T).abs().mean()
    assert_close(absolute.detach(), published["loss/kl_cov/metric/ppo_kl"])  # veRL's is absolute

    def loss(inputs: LossInputs) -> TokenLoss:
        return TokenLoss(penalty_where_selected(inputs).loss_T, {})

    check_loss(published, "kl_cov", loss, selected_T=chosen_T.float())


def test_clip_cov_equals_verls_but_for_the_dice(published: Published) -> None:
    """Tokens that lost their gradient though PPO's clip let them through are those that veRL drew."""
    plain = inputs_of(published)
    clipped(plain).loss_T.sum().backward()
    assert plain.logprobs_T.grad is not None
    drawn_T = (published["loss/clip_cov/grad"] == 0) & (plain.logprobs_T.grad != 0)
    assert int(drawn_T.sum()) == int(0.05 * len(drawn_T))
    covariances_T = covariances(published["in/logp"], published["in/advantages"])[drawn_T]
    assert float(covariances_T.min()) > 0.3 and float(covariances_T.max()) < 5.0
    assert_close(drawn_T.float().mean(), published["loss/clip_cov/metric/pg_clipfrac"])

    def loss(inputs: LossInputs) -> TokenLoss:
        token = clipped_unless_selected(inputs)
        return TokenLoss(token.loss_T, {"ppo_kl": token.metrics_T["ppo_kl"]})

    check_loss(published, "clip_cov", loss, selected_T=drawn_T.float())


@pytest.mark.parametrize("name", [name for name in KL_ESTIMATORS if name != KLEstimate.UNBIASED_K3])
def test_kl_equals_verls(published: Published, name: str) -> None:
    logprobs = published["in/logp"].clone().requires_grad_()
    value = KL_ESTIMATORS[name](logprobs, published["in/ref"])
    value.sum().backward()
    assert logprobs.grad is not None
    assert_close(value.detach(), published[f"kl/{name}/value"])
    assert_close(logprobs.grad, published[f"kl/{name}/grad"])


def test_kl_in_the_reward_equals_verls(published: Published) -> None:
    got = apply_kl_penalty(published["in/rewards"], published["in/old"], published["in/ref"], 0.01)
    assert_close(got, published["stats/kl_in_reward"])


@pytest.mark.parametrize("mode", Aggregation)
@pytest.mark.parametrize(("suffix", "length"), [("", 24), ("/factor", 100)])
def test_aggregation_equals_verls(published: Published, mode: Aggregation, suffix: str, length: int) -> None:
    weights = episode_weights(mode, published.mask.sum(1), length)
    got = sum((row.double() * weight).sum() for row, weight in zip(published.rows("in/loss_mat"), weights, strict=True))
    assert_close(torch.as_tensor(got), published[f"agg/{mode}{suffix}/value"])


def test_value_loss_equals_verls(published: Published) -> None:
    values = published["in/vpreds"].clone().requires_grad_()
    loss, share = clipped_value_loss(values, published["in/values"], published["in/returns"], clip=0.5)
    loss.mean().backward()
    assert values.grad is not None
    assert_close(loss.mean().detach(), published["value_loss/clip0.5/value"])
    assert_close(values.grad, published["value_loss/clip0.5/grad"])
    assert_close(share.mean(), published["value_loss/clip0.5/frac"])
