"""Policy losses per token, such as PPO's clipped surrogate with its clip ratio; `aggregate.py` reduces them.

Every loss maps a `LossInputs` to a `TokenLoss`. All tensors are 1-D over the trained tokens of a pack. Shape legend:
T tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.algorithms.kl import MAX_LOG_RATIO


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Inputs of a policy loss, for one pack."""

    logprobs_T: Tensor  # current policy; carries the gradient
    old_logprobs_T: Tensor  # old policy, the denominator of the ratio
    advantages_T: Tensor
    sample_T: Tensor  # index of the sample that each token belongs to; samples are never split over packs
    selected_T: Tensor | None = None  # the weights of `Algorithm.selection`: 0 where it did not select the token


@dataclass(frozen=True, slots=True)
class SelectionInputs:
    """What tokens of a mini-batch are selected by. N: its trained tokens."""

    logprobs_N: Tensor  # in the denominator of the ratio
    advantages_N: Tensor
    rewards_N: Tensor  # of the token's episode
    generator: torch.Generator
    entropies: Callable[[], Tensor]  # [N] of the policy before the update; a forward pass


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Token losses, and per-token values whose means are logged as metrics.

    ratio_T: the importance ratio that the loss clips or weights with, for a report; None if it uses none
    """

    loss_T: Tensor
    metrics_T: Mapping[str, Tensor]
    ratio_T: Tensor | None = None


# Where all advantages of a sample are zero its gradient must be, too: such samples may be skipped, unless the algorithm
# has `learns_without_advantage`.
PolicyLoss = Callable[[LossInputs], TokenLoss]


def clipped(
    inputs: LossInputs, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
) -> TokenLoss:
    """PPO's clipped surrogate (arXiv 1707.06347): max(-A r, -A clip(r, 1 - low, 1 + high)), r = p / p_old.

    clip_low and clip_high are veRL's clip_ratio_low and clip_ratio_high; clip_high > clip_low is DAPO's clip-higher
    (arXiv 2503.14476). `dual_clip` c > 1 (clip_ratio_c) bounds the loss by -c A where A < 0 (arXiv 1912.09729). The
    log ratio is clamped to +-20.
    """
    log_ratio_T = log_ratios(inputs)
    token = surrogate(inputs, log_ratio_T.exp(), clip_low, clip_high, ppo_kl=-log_ratio_T)
    if dual_clip is None:
        return token
    ceiling_T = -inputs.advantages_T * dual_clip
    bounded_T = (token.loss_T > ceiling_T) & (inputs.advantages_T < 0)
    loss_T = torch.where(bounded_T, ceiling_T, token.loss_T)
    return token_loss(loss_T, token.ratio_T, **token.metrics_T, dual_clip_fraction=bounded_T)


def surrogate(inputs: LossInputs, ratio_T: Tensor, clip_low: float, clip_high: float, **metrics_T: Tensor) -> TokenLoss:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) for any ratio r, with the clip fraction as a metric."""
    plain_T = -inputs.advantages_T * ratio_T
    bounded_T = -inputs.advantages_T * ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    return token_loss(torch.maximum(plain_T, bounded_T), ratio_T, clip_fraction=bounded_T > plain_T, **metrics_T)


def policy_gradient(inputs: LossInputs) -> TokenLoss:
    """REINFORCE (Williams 1992): -A log p, without importance sampling: meant for on-policy updates."""
    return token_loss(-inputs.advantages_T * inputs.logprobs_T, ppo_kl=-log_ratios(inputs))


def within_trust_region(inputs: LossInputs, kept_T: Tensor, ratio_cap: float) -> TokenLoss:
    """-stop(min(r, cap)) * A * log p where `kept_T`, else 0: REINFORCE with truncated ratios r = p / p_old."""
    log_ratio_T = log_ratios(inputs)
    ratio_T = log_ratio_T.detach().exp()
    loss_T = -inputs.advantages_T * ratio_T.clamp(max=ratio_cap) * inputs.logprobs_T * kept_T
    return token_loss(loss_T, ratio_T, clip_fraction=~kept_T, ppo_kl=-log_ratio_T)


def log_ratios(inputs: LossInputs) -> Tensor:
    """[T] log p - log p_old, clamped to +-20."""
    return (inputs.logprobs_T - inputs.old_logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sample_sums(values_T: Tensor, sample_T: Tensor) -> Tensor:
    """[T] the sum over each token's sample.

    There is room for T samples, so that the host need not wait for a GPU to learn how many there are.
    """
    sorted_T, order_T = sample_T.sort()
    place_T = torch.zeros_like(sample_T)
    place_T[1:] = (sorted_T[1:] != sorted_T[:-1]).cumsum(0)
    place_T = torch.empty_like(place_T).scatter(0, order_T, place_T)
    return torch.zeros_like(values_T).index_add(0, place_T, values_T)[place_T]


def sample_means(values_T: Tensor, sample_T: Tensor) -> Tensor:
    """[T] the mean over each token's sample."""
    return sample_sums(values_T, sample_T) / sample_sums(torch.ones_like(values_T), sample_T)


def covariances(logprobs_N: Tensor, advantages_N: Tensor) -> Tensor:
    """[N] each token's term in the covariance of log-prob and advantage, which drives the decrease of entropy."""
    return (logprobs_N - logprobs_N.mean()) * (advantages_N - advantages_N.mean())


def token_loss(loss_T: Tensor, ratio_T: Tensor | None = None, **metrics_T: Tensor) -> TokenLoss:
    """The loss with detached metrics, and the detached ratio that it uses, if any."""
    metrics = {name: value_T.detach().to(loss_T.dtype) for name, value_T in metrics_T.items()}
    return TokenLoss(loss_T, metrics, None if ratio_T is None else ratio_T.detach())
