"""Whole presets, from rewards to the loss and its gradient, against the objectives of the papers written out in floats.

One prompt, two responses of two tokens and one, rewards 1 and 0. Gradients of the papers' objectives are central
differences; what stands under a stop-gradient is held where the gradient is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch

from tests.verl.algorithms.test_algorithm_family import selection_of
from toolrl.algorithms import presets
from verl.algorithms.aggregate import episode_weights
from verl.algorithms.algorithm import Algorithm
from verl.algorithms.estimators.advantage import AdvantageInputs
from verl.algorithms.losses.policy_loss import LossInputs

OLD = (-0.2, -5.0, -2.0)
RESPONSES = ((0, 1), (2,))
LONGEST = 8
UNIT = 0.5 / (math.sqrt(0.5) + 1e-6)  # GRPO's advantage of reward 1 beside reward 0: the std is sqrt(1/2)
PRESETS = {preset.name: preset for preset in presets()}
Logprobs = Sequence[float]


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def ratio(new: Logprobs, token: int) -> float:
    return math.exp(new[token] - OLD[token])


def ppo(new: Logprobs, token: int, advantage: float, low: float = 0.8, high: float = 1.2) -> float:
    """min(r A, clip(r) A)"""
    r = ratio(new, token)
    return min(r * advantage, clip(r, low, high) * advantage)


def token_mean(term: Callable[..., float], better: float, worse: float, new: Logprobs, *at: Logprobs) -> float:
    return (term(new, *at, 0, better) + term(new, *at, 1, better) + term(new, *at, 2, worse)) / 3


# What each paper maximises: (log-probs, log-probs under a stop-gradient) -> objective.


def dapo(new: Logprobs, at: Logprobs) -> float:
    return token_mean(partial(ppo, high=1.28), UNIT, -UNIT, new)


def dr_grpo(new: Logprobs, at: Logprobs) -> float:
    """Sums over tokens, divided by the longest response and the number of responses."""
    return token_mean(ppo, 0.5, -0.5, new) * 3 / LONGEST / 2


def pass_at_k(new: Logprobs, at: Logprobs) -> float:
    """The best response is worth what the second best lacks; the other is worth nothing."""
    return token_mean(ppo, 1.0, 0.0, new)


def gspo(new: Logprobs, at: Logprobs) -> float:
    def response(tokens: Sequence[int], advantage: float) -> float:
        s = math.exp(sum(new[token] - OLD[token] for token in tokens) / len(tokens))
        return min(s * advantage, clip(s, 1 - 3e-4, 1 + 4e-4) * advantage)

    return (response(RESPONSES[0], UNIT) + response(RESPONSES[1], -UNIT)) / 2


def cispo(new: Logprobs, at: Logprobs) -> float:
    def term(new: Logprobs, at: Logprobs, token: int, advantage: float) -> float:
        return min(ratio(at, token), 5.0) * advantage * new[token]

    return token_mean(term, UNIT, -UNIT, new, at)


def gmpo(new: Logprobs, at: Logprobs) -> float:
    """The geometric mean over a response of |min(r A, clip(r, e^-0.4, e^0.4) A)|, with the advantage's sign."""

    def response(tokens: Sequence[int], advantage: float) -> float:
        factors = [abs(ppo(new, token, advantage, math.exp(-0.4), math.exp(0.4))) for token in tokens]
        return math.copysign(math.prod(factors) ** (1 / len(tokens)), advantage)

    return (response(RESPONSES[0], UNIT) + response(RESPONSES[1], -UNIT)) / 2


def sapo(new: Logprobs, at: Logprobs) -> float:
    def gated(token: int, tau: float) -> float:
        return 4 / tau / (1 + math.exp(-tau * (ratio(new, token) - 1)))

    return ((gated(0, 1.0) + gated(1, 1.0)) / 2 * UNIT - gated(2, 1.05) * UNIT) / 2


def gpg(new: Logprobs, at: Logprobs) -> float:
    """One group, whose rewards differ: alpha is 1."""
    return (0.5 * new[0] + 0.5 * new[1] - 0.5 * new[2]) / 3


def opo(new: Logprobs, at: Logprobs) -> float:
    """The baseline is (2 * 1 + 1 * 0) / 3."""
    return ((new[0] + new[1]) / 3 - new[2] * 2 / 3) / 2


# Mean log-prob -2.4, mean advantage UNIT / 3: covariances of 1.04, -1.23 and -0.38. The first is the largest, and the
# only one within 1 and 5.


def clip_cov(new: Logprobs, at: Logprobs) -> float:
    return (ppo(new, 1, UNIT) + ppo(new, 2, -UNIT)) / 3


def kl_cov(new: Logprobs, at: Logprobs) -> float:
    return (ratio(new, 0) + ratio(new, 1) - ratio(new, 2)) * UNIT / 3 - abs(new[0] - OLD[0]) / 3


def loss_of(preset: Algorithm, new: Logprobs) -> tuple[float, list[float]]:
    """The preset's loss and its gradient by the log-probs."""
    rewards = [torch.tensor([0.0, 1.0], dtype=torch.float64), torch.tensor([0.0], dtype=torch.float64)]
    advantages = torch.cat(preset.advantage(AdvantageInputs(rewards, torch.tensor([0, 0]))).advantages)
    old, logprobs = (torch.tensor(each, dtype=torch.float64) for each in (OLD, new))
    selected = preset.selection(selection_of(old, advantages)).double() if preset.selection else None
    token = preset.policy_loss(
        LossInputs(logprobs.requires_grad_(), old, advantages, torch.tensor([0, 0, 1]), selected)
    )
    lengths = torch.tensor([2, 1])
    weights = episode_weights(preset.aggregation, lengths, LONGEST).repeat_interleave(lengths)
    loss = (token.loss_T * weights).sum()
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad.tolist()


def gradient(objective: Callable[[Logprobs, Logprobs], float], at: Logprobs) -> list[float]:
    """By central differences; what stands under a stop-gradient does not move."""
    step, slopes = 1e-6, []
    for token in range(len(at)):
        up, down = ([each + sign * step * (place == token) for place, each in enumerate(at)] for sign in (1, -1))
        slopes.append((objective(up, at) - objective(down, at)) / (2 * step))
    return slopes


PAPERS = [dapo, dr_grpo, pass_at_k, gspo, cispo, gmpo, sapo, gpg, opo, clip_cov, kl_cov]
NEAR, UP, DOWN, FAR = (1e-4, 2e-4, -2e-4), (0.1, 0.5, 0.05), (-0.5, 0.1, -0.5), (0.22, 1.7, 0.6)


@pytest.mark.parametrize("moved", [NEAR, UP, DOWN, FAR])
@pytest.mark.parametrize("paper", PAPERS, ids=lambda each: each.__name__)
def test_a_preset_is_its_papers_objective(
    paper: Callable[[Logprobs, Logprobs], float], moved: tuple[float, float, float]
) -> None:
    """moved: by how much each log-prob lies above the old one; NEAR is within every clip."""
    new = [old + more for old, more in zip(OLD, moved, strict=True)]
    loss, slopes = loss_of(PRESETS[paper.__name__], new)
    assert loss == pytest.approx(-paper(new, new), rel=1e-6)
    assert slopes == pytest.approx([-slope for slope in gradient(paper, new)], rel=1e-5, abs=1e-7)
