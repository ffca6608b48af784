"""Advantages, losses, KL and aggregation: hand-worked numbers, veRL's published functions, and invariances."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms import ALGORITHMS
from verl.algorithms.aggregate import episode_weights
from verl.algorithms.algorithm import Algorithm
from verl.algorithms.estimators.advantage import AdvantageInputs, gae, group_normalized, grpo, whitened
from verl.algorithms.estimators.reinforce_pp_baseline import reinforce_pp_baseline
from verl.algorithms.kl import KL_ESTIMATORS, apply_kl_penalty, k3
from verl.algorithms.losses.policy_loss import LossInputs, clipped
from verl.algorithms.losses.ppo import clipped_value_loss
from verl.algorithms.names import Aggregation
from verl.registry import resolve

ONE_SAMPLE = torch.zeros(0, dtype=torch.long)


def rollouts(rewards: list[list[float]], groups: list[int], values: list[list[float]] | None = None) -> AdvantageInputs:
    critics = None if values is None else [torch.tensor(each) for each in values]
    return AdvantageInputs([torch.tensor(each) for each in rewards], torch.tensor(groups), critics)


def test_grpo_by_hand() -> None:
    # group 0: sums 1 and 3, mean 2, unbiased std sqrt(2); group 1: one sample keeps its reward
    got = grpo(rollouts([[0.0, 1.0], [1.0, 2.0], [5.0]], [0, 0, 1])).advantages
    unit = 1 / (math.sqrt(2) + 1e-6)
    assert torch.cat(got).tolist() == pytest.approx([-unit, -unit, unit, unit, 5 / (1 + 1e-6)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero(dtype: torch.dtype) -> None:
    """Whatever the rounding error of their mean, which in float64 is not 0 for some of these sizes."""
    for size in range(2, 17):
        assert group_normalized(torch.full((size,), 0.1, dtype=dtype)).tolist() == [0.0] * size


def test_groups_are_normalized_in_float64() -> None:
    """To the last bit, which a standard deviation in float32 would change."""
    source = np.random.default_rng(0)
    for _ in range(200):
        rewards = torch.from_numpy(np.float32(source.normal(1000.0, 1.0, size=5)))
        exact = rewards.double()
        expected = (exact - exact.mean()) / (exact.std() + 1e-6)
        assert torch.equal(group_normalized(rewards), expected.float())


def test_whitening_reports_mean_and_standard_deviation() -> None:
    got = reinforce_pp_baseline(rollouts([[0.0], [4.0], [5.0], [5.0]], [0, 0, 1, 1]))  # -2, 2, 0 and 0
    assert got.whitening is not None
    assert (got.whitening.mean, got.whitening.std) == pytest.approx((0.0, math.sqrt(8 / 3)))


def test_reinforce_pp_baseline_by_hand() -> None:
    # sums 0 and 2 with mean 1, 5 and 5 with mean 5, so the five tokens hold -1, 1, 1, 0, 0
    got = reinforce_pp_baseline(rollouts([[0.0], [1.0, 1.0], [5.0], [5.0]], [0, 0, 1, 1]))
    assert got.returns is None and [len(each) for each in got.advantages] == [1, 2, 1, 1]
    raw = torch.tensor([-1.0, 1.0, 1.0, 0.0, 0.0])
    assert torch.cat(got.advantages).tolist() == pytest.approx(((raw - raw.mean()) / raw.std()).tolist(), abs=1e-6)


@settings(deadline=None)
@given(st.floats(-3, 3), st.floats(0.5, 4))
def test_reinforce_pp_baseline_does_not_see_where_rewards_lie_or_how_large_they_are(shift: float, scale: float) -> None:
    rewards = [0.0, 1.0, 0.25, 0.5]
    moved = [reward * scale + shift for reward in rewards]
    both = [
        torch.cat(reinforce_pp_baseline(rollouts([[0.0, each] for each in which], [0, 0, 1, 1])).advantages)
        for which in (rewards, moved)
    ]
    torch.testing.assert_close(both[0], both[1], atol=1e-4, rtol=1e-4)


def test_reinforce_pp_baseline_finds_nothing_in_equal_rewards() -> None:
    got = reinforce_pp_baseline(rollouts([[1.0], [1.0], [3.0, 0.0], [3.0]], [0, 0, 1, 1]))
    assert torch.cat(got.advantages).tolist() == [0.0] * 5


def test_gae_by_hand() -> None:
    # delta: 0 + .5*.4 - .2 = 0, then 1 - .4 = .6;  A: 0 + .5*.8*.6 = .24, then .6;  returns = A + V
    got = gae(rollouts([[0.0, 1.0]], [0], [[0.2, 0.4]]), gamma=0.5, lam=0.8)
    assert got.returns is not None and got.returns[0].tolist() == pytest.approx([0.44, 1.0])
    assert torch.cat(got.advantages).tolist() == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2)], abs=1e-4)


def test_whitening_is_over_all_tokens_together() -> None:
    white = torch.cat(whitened([torch.tensor([1.0]), torch.tensor([2.0, 6.0])]).advantages)
    assert (float(white.mean()), float(white.var())) == pytest.approx((0.0, 1.0), abs=1e-6)


def test_whitening_is_in_float64() -> None:
    """To the last bit; a mean and a variance in float32 would also depend on the order of the episodes."""
    tokens = torch.from_numpy(np.float32(np.random.default_rng(0).normal(1000.0, 0.01, size=64)))
    exact = tokens.double()
    expected = ((exact - exact.mean()) * torch.rsqrt(exact.var() + 1e-8)).float()
    assert torch.equal(torch.cat(whitened(list(tokens.split(1))).advantages), expected)
    assert torch.equal(torch.cat(whitened(list(tokens.flip(0).split(1))).advantages), expected.flip(0))


def loss_of(log_ratio: float, advantage: float, **settings: Any) -> tuple[float, float]:
    logprobs = torch.tensor([log_ratio], requires_grad=True)
    inputs = LossInputs(logprobs, torch.zeros(1), torch.tensor([advantage]), ONE_SAMPLE)
    loss = clipped(inputs, **settings).loss_T.sum()
    loss.backward()
    assert logprobs.grad is not None
    return float(loss.detach()), float(logprobs.grad)


@pytest.mark.parametrize(
    ("ratio", "advantage", "settings", "loss", "gradient"),
    [
        (1.0, 2.0, {}, -2.0, -2.0),
        (1.5, 2.0, {}, -2.4, 0.0),  # clipped above: nothing more to gain
        (0.5, 2.0, {}, -1.0, -1.0),  # the pessimistic side is never clipped
        (0.5, -2.0, {}, 1.6, 0.0),
        (1.5, -2.0, {}, 3.0, 3.0),
        (1.25, 2.0, {"clip_high": 0.28}, -2.5, -2.5),  # clip-higher leaves room
        (4.0, -2.0, {"dual_clip": 3.0}, 6.0, 0.0),
    ],
)
def test_clip_by_hand(ratio: float, advantage: float, settings: Any, loss: float, gradient: float) -> None:
    assert loss_of(math.log(ratio), advantage, **settings) == pytest.approx((loss, gradient), abs=1e-5)


def test_kl_by_hand() -> None:
    p, ref = torch.tensor([-1.0]), torch.tensor([-1.5])
    assert [float(KL_ESTIMATORS[name](p, ref)) for name in ("k1", "k2", "k3")] == pytest.approx(
        [0.5, 0.125, math.exp(-0.5) - 0.5]
    )
    assert float(k3(torch.tensor([-100.0]), torch.tensor([0.0]))) == 10.0
    assert float(apply_kl_penalty(torch.tensor([1.0]), p, ref, 0.1)) == pytest.approx(0.95)


def test_value_loss_by_hand() -> None:
    values = torch.tensor([2.0], requires_grad=True)
    loss, clipped_share = clipped_value_loss(values, torch.tensor([0.0]), torch.tensor([2.0]), clip=0.5)
    assert (loss.item(), clipped_share.item()) == (0.5 * 1.5**2, 1.0)  # held at 0.5, return 2


def test_weights_by_hand() -> None:
    lengths = torch.tensor([1, 3, 0])
    weights = {mode: episode_weights(mode, lengths, constant_length=10.0).tolist() for mode in Aggregation}
    assert weights == {
        Aggregation.TOKEN_MEAN: [0.25, 0.25, 0.0],
        Aggregation.TOKEN_SUM: [1.0, 1.0, 0.0],
        Aggregation.SEQ_MEAN_TOKEN_SUM: [0.5, 0.5, 0.0],
        Aggregation.SEQ_MEAN_TOKEN_MEAN: pytest.approx([1 / 2, 1 / 6, 0.0]),
        Aggregation.SEQ_MEAN_TOKEN_SUM_NORM: pytest.approx([1 / 20, 1 / 20, 0.0]),
    }


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_preset_is_an_algorithm_of_its_name(name: str) -> None:
    algorithm = resolve("algorithm", name, ALGORITHMS)
    assert isinstance(algorithm, Algorithm) and algorithm.name == name


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.floats(-3, 4)), min_size=1, max_size=12), st.randoms())
def test_the_order_of_samples_does_not_matter(samples: list[tuple[int, float]], random: Any) -> None:
    order = list(range(len(samples)))
    random.shuffle(order)
    straight = grpo(rollouts([[reward] for _, reward in samples], [group for group, _ in samples])).advantages
    shuffled = grpo(rollouts([[samples[i][1]] for i in order], [samples[i][0] for i in order])).advantages
    for place, index in enumerate(order):
        torch.testing.assert_close(shuffled[place], straight[index], atol=1e-4, rtol=1e-4)
