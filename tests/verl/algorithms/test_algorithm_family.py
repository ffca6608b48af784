"""Every estimator, loss and selection by hand, and the facts of the presets as their files and pages state them."""

from __future__ import annotations

import math
import subprocess
import sys
from functools import partial

import pytest
import torch

from tests.conftest import ROOT
from tests.support.every import every
from toolrl.algorithms import presets, row
from verl.algorithms import ADV_ESTIMATORS, ALGORITHMS
from verl.algorithms.algorithm import Algorithm
from verl.algorithms.estimators.advantage import AdvantageInputs, Turns, returns_to_go
from verl.algorithms.estimators.dr_grpo import group_centered
from verl.algorithms.estimators.gigpo import gigpo
from verl.algorithms.estimators.gpg import gpg
from verl.algorithms.estimators.opo import opo
from verl.algorithms.estimators.pass_at_k import pass_at_k
from verl.algorithms.estimators.reinforce_pp import reinforce_pp
from verl.algorithms.estimators.remax import remax
from verl.algorithms.estimators.rloo import rloo
from verl.algorithms.losses.cispo import weight_clipped
from verl.algorithms.losses.clip_cov import clipped_unless_selected, within_bounds
from verl.algorithms.losses.gmpo import geometric_mean
from verl.algorithms.losses.gspo import sequence_clipped
from verl.algorithms.losses.kl_cov import largest, penalty_where_selected
from verl.algorithms.losses.policy_loss import (
    LossInputs,
    PolicyLoss,
    SelectionInputs,
    covariances,
    policy_gradient,
    sample_means,
    sample_sums,
)
from verl.algorithms.losses.sapo import soft_gated
from verl.algorithms.overlong import Overlong


def selection_of(logprobs: torch.Tensor, advantages: torch.Tensor, seed: int = 0) -> SelectionInputs:
    """Of tokens that have a reward of 1, and the advantages as entropies."""
    generator = torch.Generator().manual_seed(seed)
    return SelectionInputs(logprobs, advantages, torch.ones_like(advantages), generator, lambda: advantages)


def rollouts(rewards: list[list[float]], groups: list[int], baselines: list[float] | None = None) -> AdvantageInputs:
    baseline_B = None if baselines is None else torch.tensor(baselines)
    return AdvantageInputs([torch.tensor(each) for each in rewards], torch.tensor(groups), baseline_B=baseline_B)


def per_token(advantages: list[torch.Tensor]) -> list[list[float]]:
    return [[round(value, 5) for value in each.tolist()] for each in advantages]


def test_rloo_by_hand() -> None:
    # the others' means are 4, 3 and 2; a group of one keeps its reward
    got = rloo(rollouts([[1.0], [1.0, 2.0], [5.0], [7.0]], [0, 0, 0, 1]))
    assert per_token(got.advantages) == [[-3.0], [0.0, 0.0], [3.0], [7.0]]


def test_remax_by_hand() -> None:
    # what is still to come (0.9 and 1; 0), less the greedy response's 0.5
    got = remax(rollouts([[-0.1, 1.0], [0.0]], [0, 0], [0.5, 0.5]))
    assert per_token(got.advantages) == [[0.4, 0.5], [-0.5]]


def test_opo_by_hand() -> None:
    # lengths 1 and 3: the baseline is (1 * 1 + 3 * 0) / 4
    got = opo(rollouts([[1.0], [0.0, 0.0, 0.0], [0.1], [0.1, 0.0]], [0, 0, 1, 1]))
    assert per_token(got.advantages) == [[0.75], [-0.25] * 3, [0.0], [0.0, 0.0]]


def test_gpg_by_hand() -> None:
    # two of four responses are in a group without a difference: alpha = 4 / 2
    got = gpg(rollouts([[1.0], [0.0], [1.0], [1.0]], [0, 0, 1, 1]))
    assert per_token(got.advantages) == [[1.0], [-1.0], [0.0], [0.0]]
    mean = gpg(rollouts([[1.0], [0.5], [0.0], [1.0]], [0, 0, 0, 1]))  # the second is its group's mean, all three count
    assert torch.cat(mean.advantages).tolist() == pytest.approx([0.5, 0.0, -0.5, 1.0])
    silent = gpg(rollouts([[1.0], [1.0]], [0, 0]))
    assert per_token(silent.advantages) == [[0.0], [0.0]]


def test_dr_grpo_by_hand() -> None:
    got = group_centered(rollouts([[4.0], [0.0, 1.0]], [0, 0]))
    assert per_token(got.advantages) == [[1.5], [-1.5, -1.5]]


def test_reinforce_pp_by_hand() -> None:
    assert returns_to_go(torch.tensor([1.0, 0.0, 2.0]), 0.5).tolist() == [1.5, 1.0, 2.0]
    got = torch.cat(reinforce_pp(rollouts([[1.0, 0.0, 2.0], [0.0]], [0, 1]), gamma=0.5).advantages)
    raw = torch.tensor([1.5, 1.0, 2.0, 0.0])
    assert got.tolist() == pytest.approx(((raw - raw.mean()) / raw.std()).tolist(), abs=1e-6)


def test_pass_at_k_by_hand() -> None:
    got = pass_at_k(rollouts([[0.0], [1.0], [3.0], [2.0], [2.0]], [0, 0, 0, 1, 1]))
    assert per_token(got.advantages) == [[0.0], [0.0], [2.0], [0.0], [0.0]]
    divided = pass_at_k(rollouts([[0.0], [2.0]], [0, 0]), divide_by_std=True)  # std sqrt(2)
    assert per_token(divided.advantages) == [[0.0], [round(math.sqrt(2), 5)]]


def test_gigpo_by_hand() -> None:
    # Two episodes of rewards 1 and 0 with two turns of one token; the second turns met the same state, 7. Discounted by
    # half the first turns return 0.5 and 0. Not divided: episodes +-0.5, first turns +-0.25, second turns +-0.5.
    two = torch.tensor([0, 1])
    turns = [Turns(two, torch.tensor([3, 7])), Turns(two, torch.tensor([3, 7]))]
    batch = AdvantageInputs([torch.tensor([0.0, 1.0]), torch.tensor([0.0, 0.0])], torch.tensor([0, 0]), turns=turns)
    got = gigpo(batch, gamma=0.5, turn_weight=1.0, divide_by_std=False)
    assert per_token(got.advantages) == [[0.75, 1.0], [-0.75, -1.0]]
    # states that no other rollout met leave the episode's advantage alone
    alone = [Turns(two, torch.tensor([3, 7])), Turns(two, torch.tensor([3, 8]))]
    lone = gigpo(AdvantageInputs(batch.token_rewards, batch.group_B, turns=alone), 0.5, 1.0, False)
    assert per_token(lone.advantages) == [[0.75, 0.5], [-0.75, -0.5]]


def learned(
    loss: PolicyLoss,
    ratios: list[float],
    advantages: list[float],
    samples: list[int],
    selected: list[float] | None = None,
    logprob: float = 0.0,
) -> tuple[list[float], list[float]]:
    """(token losses, gradient of their sum) for ratios to an old policy at log-prob `logprob`."""
    old_T = torch.full((len(ratios),), logprob)
    logprobs_T = (old_T + torch.tensor(ratios).log()).requires_grad_()
    chosen_T = None if selected is None else torch.tensor(selected)
    token = loss(LossInputs(logprobs_T, old_T, torch.tensor(advantages), torch.tensor(samples), chosen_T))
    token.loss_T.sum().backward()
    assert logprobs_T.grad is not None
    return token.loss_T.tolist(), logprobs_T.grad.tolist()


def close(got: tuple[list[float], list[float]], losses: list[float], gradient: list[float]) -> None:
    assert got[0] == pytest.approx(losses, abs=1e-5) and got[1] == pytest.approx(gradient, abs=1e-5)


def test_sample_means_by_hand() -> None:
    assert sample_means(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([9, 9, 4])).tolist() == [2.0, 2.0, 5.0]
    empty = torch.zeros(0)
    assert sample_means(empty, empty.long()).tolist() == []


@pytest.mark.parametrize("seed", range(5))
def test_sums_and_means_of_samples_equal_those_by_counting(seed: int) -> None:
    """Of tokens in any order, with their gradients; by torch's bincount and unique, which wait for a GPU."""
    generator = torch.Generator().manual_seed(seed)
    sample_T = torch.randint(0, 9, (40,), generator=generator)
    values_T = torch.randn(40, generator=generator, dtype=torch.float64, requires_grad=True)
    counted_T = torch.bincount(sample_T, values_T.detach())[sample_T]
    torch.testing.assert_close(sample_sums(values_T.detach(), sample_T), counted_T)
    _, index_T, count_S = sample_T.unique(return_inverse=True, return_counts=True)
    expected_T = (values_T.new_zeros(len(count_S)).index_add(0, index_T, values_T) / count_S)[index_T]
    weight_T = torch.randn(40, generator=generator, dtype=torch.float64)
    found_T = sample_means(values_T, sample_T)
    torch.testing.assert_close(found_T, expected_T)
    gradients = [torch.autograd.grad((weight_T * each).sum(), values_T) for each in (found_T, expected_T)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("loss", [sequence_clipped, geometric_mean])
def test_losses_of_sequences_never_read_from_the_device(loss: PolicyLoss) -> None:
    """They run on tensors without data."""
    values_T = torch.empty(6, device="meta", requires_grad=True)
    places_T = torch.empty(6, device="meta", dtype=torch.long)
    token = loss(LossInputs(values_T, values_T.detach(), values_T.detach(), places_T))
    token.loss_T.sum().backward()
    assert values_T.grad is not None


def test_policy_gradient_by_hand() -> None:
    close(learned(policy_gradient, [1.0], [2.0], [0], logprob=-3.0), [6.0], [-2.0])


def test_gspo_by_hand() -> None:
    # ratios 2 and 1/2 of one sample have the geometric mean 1; 4 and 1 have 2, which a clip of 1.5 stops where A > 0
    loss = partial(sequence_clipped, clip_low=0.5, clip_high=0.5)
    close(learned(loss, [2.0, 0.5, 4.0, 1.0], [1.0, 1.0, 3.0, 3.0], [0, 0, 1, 1]), [-1, -1, -4.5, -4.5], [-1, -1, 0, 0])
    close(learned(loss, [4.0, 1.0], [-1.0, -1.0], [0, 0]), [2.0, 2.0], [2.0, 2.0])


def test_cispo_by_hand() -> None:
    # the weight 8 is held at 5, and the gradient lives on
    got = learned(weight_clipped, [8.0, 0.5], [1.0, -1.0], [0, 0])
    close(got, [-5.0 * math.log(8), 0.5 * math.log(0.5)], [-5.0, 0.5])


def test_gmpo_by_hand() -> None:
    # log ratios 0.8 and 0 where A > 0: the first is held at 0.4, the mean is 0.2
    up = math.exp(0.2)
    close(learned(geometric_mean, [math.exp(0.8), 1.0], [2.0, 2.0], [0, 0]), [-2 * up] * 2, [0.0, -2 * up])
    # where A < 0 only a fall is held: -0.8 at -0.4
    down = math.exp(-0.2)
    close(learned(geometric_mean, [math.exp(-0.8), 1.0], [-2.0, -2.0], [0, 0]), [2 * down] * 2, [0.0, 2 * down])


def test_sapo_by_hand() -> None:
    # at ratio 1 the gate is 2 / tau and its slope 1; at 2 with tau 1 the slope is 4 s (1 - s) * ratio, s = sigmoid(1)
    close(learned(soft_gated, [1.0, 1.0], [1.0, -1.0], [0, 0]), [-2.0, 2.0 / 1.05], [-1.0, 1.0])
    s = 1 / (1 + math.exp(-1))
    close(learned(soft_gated, [2.0], [1.0], [0]), [-4 * s], [-4 * s * (1 - s) * 2])


def test_clip_cov_by_hand() -> None:
    close(learned(clipped_unless_selected, [1.0, 1.0], [1.0, 1.0], [0, 0], [0.0, 1.0]), [-1.0, 0.0], [-1.0, 0.0])
    # log-probs -4, 0, 0, 0 and advantages -2, 2, 0, 0: covariances 6, 2, 0, 0, of which one lies within 1 and 5
    logprobs, advantages = torch.tensor([-4.0, 0.0, 0.0, 0.0]), torch.tensor([-2.0, 2.0, 0.0, 0.0])
    assert covariances(logprobs, advantages).tolist() == [6.0, 2.0, 0.0, 0.0]
    assert within_bounds(selection_of(logprobs, advantages), share=1.0).tolist() == [False, True, False, False]
    flat = torch.zeros(4)
    assert not within_bounds(selection_of(flat, flat), share=1.0).any()


def test_clip_cov_takes_its_share_and_repeats_itself() -> None:
    logprobs, advantages = torch.linspace(-4, 0, 1000), torch.linspace(-3, 3, 1000)
    drawn = [within_bounds(selection_of(logprobs, advantages, seed), 0.02) for seed in (1, 1, 2)]
    assert [int(each.sum()) for each in drawn] == [20, 20, 20]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def test_kl_cov_by_hand() -> None:
    # beta 0.5 on the second token alone: 0.5 * |log 2|, whose gradient is 0.5
    got = learned(partial(penalty_where_selected, beta=0.5), [2.0, 2.0], [1.0, 1.0], [0, 0], [0.0, 1.0])
    close(got, [-2.0, -2.0 + 0.5 * math.log(2)], [-2.0, -1.5])
    logprobs, advantages = torch.tensor([-4.0, 0.0, 0.0, 0.0]), torch.tensor([-2.0, 2.0, 0.0, 0.0])
    assert largest(selection_of(logprobs, advantages), share=0.5).tolist() == [True, True, False, False]
    assert largest(selection_of(logprobs, advantages), share=1e-9).tolist() == [True, False, False, False]


def test_the_overlong_penalty_by_hand() -> None:
    overlong = Overlong(buffer=4, factor=2.0).with_max_tokens(20)
    assert [overlong.penalty(length) for length in (0, 16, 17, 19, 20, 30)] == [0.0, 0.0, -0.5, -1.5, -2.0, -2.0]
    assert Overlong().with_max_tokens(20480) == Overlong(20480, 4096, 1.0)


@pytest.mark.parametrize("algorithm", presets(), ids=lambda each: each.name)
def test_only_a_preset_with_filters_draws_several_rounds(algorithm: Algorithm) -> None:
    assert algorithm.max_resample_rounds == 1 or algorithm.filters


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_preset_is_one_short_file(name: str) -> None:
    module = ALGORITHMS[name].partition(":")[0]
    assert len((ROOT / f"{module.replace('.', '/')}.py").read_text().splitlines()) < 60


def test_generated_pages_are_up_to_date() -> None:
    check = [sys.executable, "scripts/pages.py", "--check"]
    assert subprocess.run(check, cwd=ROOT, capture_output=True, text=True, check=False).stdout == ""
    page = (ROOT / "docs" / "algorithms.md").read_text()
    assert every(f"`{name}`" in page for name in ADV_ESTIMATORS)


def test_the_table_shows_the_parts_of_a_preset() -> None:
    (dapo,) = [row(each) for each in presets() if each.name == "dapo"]
    extras = "filter zero_variance, 10 resample rounds, overlong penalty"
    assert dapo == ("dapo", "grpo", "clipped clip_low=0.2 clip_high=0.28", "token-mean", "none", extras, dapo[-1])


@pytest.mark.long
def test_the_command_prints_every_algorithm_and_refuses_arguments() -> None:
    command = [sys.executable, "-m", "toolrl.algorithms"]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert every(f" {name} " in output for name in ALGORITHMS)
    assert subprocess.run([*command, "--all"], cwd=ROOT, capture_output=True, check=False).returncode == 2


def test_names_are_known_without_torch() -> None:
    code = "import sys, verl.algorithms, verl.config.schema; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
