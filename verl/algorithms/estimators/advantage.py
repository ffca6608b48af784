"""Advantage estimators, and advantage normalization within a group (GRPO) or over the batch (whitening).

Every estimator maps an `AdvantageInputs` to an `Advantages`. The tensors hold trained tokens only: masked tokens
(prompts, observations) are removed beforehand, so no estimator needs a mask. Shape legend: B episodes, G episodes of
one prompt, L trained tokens of one episode, in all of its segments.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

_EPSILON = 1e-6
_WHITEN_EPSILON = 1e-8


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns of one episode. N: turns."""

    turn_L: Tensor  # [L] index of the turn that each token belongs to, from 0
    state_N: Tensor  # [N] state id of each turn: equal ids mean the same prompt and the same observation


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """The estimator's view of a batch. Values, baselines and turns are set where the algorithm requests them."""

    token_rewards: list[Tensor]  # [B][L]; an episode's reward is their sum
    group_B: Tensor  # [B] group id: the prompt that each episode belongs to
    values: list[Tensor] | None = None  # [B][L] value estimates of the critic
    baseline_B: Tensor | None = None  # [B] the reward of the greedy response to each episode's prompt
    turns: list[Turns] | None = None  # [B]
    parts: Mapping[str, Tensor] = field(default_factory=dict)  # [B] the parts of each episode's score, by name

    @property
    def rewards(self) -> Tensor:
        """[B] total reward of each episode."""
        return torch.segment_reduce(torch.cat(self.token_rewards), "sum", lengths=self.lengths, initial=0)

    @property
    def lengths(self) -> Tensor:
        """[B] number of trained tokens of each episode."""
        return torch.tensor([rewards_L.numel() for rewards_L in self.token_rewards])

    def broadcast_to_tokens(self, values_B: Tensor) -> list[Tensor]:
        """[B][L] each episode's value, repeated on all of its tokens."""
        lengths_B = self.lengths
        return list(values_B.repeat_interleave(lengths_B).split(lengths_B.tolist()))


@dataclass(frozen=True, slots=True)
class Whitening:
    """A = (x - mean) / std over all trained tokens of the batch."""

    mean: float
    std: float


@dataclass(frozen=True, slots=True)
class Advantages:
    """Advantages, and the critic's regression targets if there is a critic."""

    advantages: list[Tensor]  # [B][L]
    returns: list[Tensor] | None = None  # [B][L]
    whitening: Whitening | None = None  # that of the advantages, for a report


AdvantageEstimator = Callable[[AdvantageInputs], Advantages]


def group_normalized(rewards_G: Tensor, divide_by_std: bool = True) -> Tensor:
    """[G] (r - mean) / (std + 1e-6), unbiased std: GRPO (arXiv 2402.03300, eq. in 4.1.2; veRL and ToolRL use n - 1).

    A group of one keeps its reward (mean 0, std 1), as in veRL. Equal rewards give exactly zero. In float64, as
    `whitened`.
    """
    if rewards_G.numel() == 1:
        return rewards_G / (1.0 + _EPSILON) if divide_by_std else rewards_G
    if bool((rewards_G == rewards_G[0]).all()):
        return torch.zeros_like(rewards_G)  # the mean's rounding error must not become an advantage
    exact_G = rewards_G.double()
    centered_G = exact_G - exact_G.mean()
    advantages_G = centered_G / (exact_G.std() + _EPSILON) if divide_by_std else centered_G
    return advantages_G.to(rewards_G.dtype)


def compared(returns_G: Tensor, divide_by_std: bool = True) -> Tensor:
    """[G] `group_normalized`, but 0 for a group of one: there is nothing to compare it with."""
    return torch.zeros_like(returns_G) if returns_G.numel() == 1 else group_normalized(returns_G, divide_by_std)


def apply_per_group(group_N: Tensor, estimate: Callable[..., Tensor], *values_N: Tensor) -> Tensor:
    """[N] `estimate` applied to each group, on the group's slice of every tensor of `values_N`."""
    order_N = group_N.argsort(stable=True)
    sizes = group_N[order_N].unique_consecutive(return_counts=True)[1].tolist()
    by_group = zip(*(each_N[order_N].split(sizes) for each_N in values_N), strict=True)
    estimates_N = torch.empty_like(values_N[0])
    estimates_N[order_N] = torch.cat([estimate(*values) for values in by_group])
    return estimates_N


def group_advantage(rollouts: AdvantageInputs, estimate: Callable[[Tensor], Tensor]) -> Advantages:
    """Apply `estimate` to the rewards of each group; broadcast each episode's result to all of its tokens."""
    return Advantages(rollouts.broadcast_to_tokens(apply_per_group(rollouts.group_B, estimate, rollouts.rewards)))


def grpo(rollouts: AdvantageInputs) -> Advantages:
    return group_advantage(rollouts, group_normalized)


def returns_to_go(rewards_L: Tensor, gamma: float) -> Tensor:
    """[L] R_t = r_t + gamma * R_{t+1}"""
    running, returns = 0.0, []
    for reward in reversed(rewards_L.tolist()):  # plain floats: one tensor per token would take minutes
        running = reward + gamma * running
        returns.append(running)
    return rewards_L.new_tensor(returns[::-1])


def turn_returns(rewards_L: Tensor, turns: Turns, gamma: float) -> Tensor:
    """[N] discounted return of each turn; there is no discount within a turn."""
    rewards_N = rewards_L.new_zeros(len(turns.state_N)).index_add(0, turns.turn_L, rewards_L)
    return returns_to_go(rewards_N, gamma)


def gae(
    rollouts: AdvantageInputs,
    gamma: float = 1.0,
    lam: float = 1.0,
    critic_lam: float | None = None,
    length_alpha: float | None = None,
) -> Advantages:
    """Generalized advantage estimation (arXiv 1506.02438), whitened over all trained tokens of the batch, as in PPO.

    delta_t = r_t + gamma * V_{t+1} - V_t, with V = 0 after the last token
    A_t = delta_t + gamma * lam * A_{t+1};  the critic's target is A_t + V_t, before whitening

    critic_lam: lambda of the critic's target, if it is another one (VC-PPO, arXiv 2503.01491); length_alpha: an episode
    of L tokens has lambda 1 - 1 / (length_alpha * L), at least 0, in place of `lam` (VAPO, arXiv 2504.05118)
    """
    assert rollouts.values is not None, "GAE needs a critic"
    raw, returns = [], []
    for rewards_L, values_L in zip(rollouts.token_rewards, rollouts.values, strict=True):
        next_values_L = torch.cat([values_L[1:], values_L.new_zeros(1)])[: len(values_L)]
        deltas_L = rewards_L + gamma * next_values_L - values_L
        own = lam if length_alpha is None else max(0.0, 1.0 - 1.0 / (length_alpha * max(1, len(values_L))))
        raw.append(returns_to_go(deltas_L, gamma * own))
        target_L = raw[-1] if critic_lam is None else returns_to_go(deltas_L, gamma * critic_lam)
        returns.append(target_L + values_L)
    return whitened(raw, returns)


def whitened(tokens: list[Tensor], returns: list[Tensor] | None = None) -> Advantages:
    """The lists normalized to mean 0 and variance 1 over all tokens together (unbiased variance, + 1e-8).

    In float64: returns that are nearly equal magnify the rounding error of a mean in float32, which depends on the
    order of the episodes.
    """
    flat_T = torch.cat(tokens)
    exact_T = flat_T.double()
    variance = exact_T.var() if exact_T.numel() > 1 else exact_T.new_ones(())
    mean, variance = exact_T.mean(), variance + _WHITEN_EPSILON
    white_T = (exact_T - mean) * torch.rsqrt(variance)
    split = list(white_T.to(flat_T.dtype).split([len(each) for each in tokens]))
    return Advantages(split, returns, Whitening(float(mean), float(variance.sqrt())))
