"""Policy losses, token by token; `aggregate.py` says how they become one number.

Every loss maps a `LossInputs` to a `TokenLoss`. All tensors are 1-D over the trained tokens of a pack. Shape legend:
T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.algorithms.kl import MAX_LOG_RATIO


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What a policy loss sees of a pack."""

    logprobs_T: Tensor  # of the policy being trained; carries the gradient
    old_logprobs_T: Tensor  # of the policy the clip is measured from
    advantages_T: Tensor
    sample_T: Tensor  # which sample of the pack each token belongs to; a sample is in one pack as a whole
    selected_T: Tensor | None = None  # 1.0 where the algorithm's selection chose the token, else 0.0


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Token losses, and facts per token whose means are metrics."""

    loss_T: Tensor
    metrics_T: Mapping[str, Tensor]


# Must have no gradient where all advantages of a sample are zero: such samples may not be computed at all.
PolicyLoss = Callable[[LossInputs], TokenLoss]


def clipped(
    inputs: LossInputs, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
) -> TokenLoss:
    """PPO's clipped surrogate (arXiv 1707.06347): max(-A r, -A clip(r, 1 - low, 1 + high)), r = p / p_old.

    clip_high > clip_low is DAPO's clip-higher (arXiv 2503.14476). `dual_clip` c > 1 bounds the loss by -c A where A < 0
    (arXiv 1912.09729). The log ratio is held within 20.
    """
    log_ratio_T = log_ratios(inputs)
    token = surrogate(inputs, log_ratio_T.exp(), clip_low, clip_high, ppo_kl=-log_ratio_T)
    if dual_clip is None:
        return token
    ceiling_T = -inputs.advantages_T * dual_clip
    bounded_T = (token.loss_T > ceiling_T) & (inputs.advantages_T < 0)
    loss_T = torch.where(bounded_T, ceiling_T, token.loss_T)
    return token_loss(loss_T, **token.metrics_T, dual_clip_fraction=bounded_T)


def surrogate(inputs: LossInputs, ratio_T: Tensor, clip_low: float, clip_high: float, **facts_T: Tensor) -> TokenLoss:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) of any ratio, and at how many tokens the clip was active."""
    plain_T = -inputs.advantages_T * ratio_T
    bounded_T = -inputs.advantages_T * ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    return token_loss(torch.maximum(plain_T, bounded_T), clip_fraction=bounded_T > plain_T, **facts_T)


def policy_gradient(inputs: LossInputs) -> TokenLoss:
    """REINFORCE (Williams 1992): -A log p. Nothing corrects for a policy that has moved since it sampled."""
    return token_loss(-inputs.advantages_T * inputs.logprobs_T, ppo_kl=-log_ratios(inputs))


def log_ratios(inputs: LossInputs) -> Tensor:
    """[T] log p - log p_old, held within 20."""
    return (inputs.logprobs_T - inputs.old_logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sample_means(values_T: Tensor, sample_T: Tensor) -> Tensor:
    """[T] the mean over the sample that each token belongs to."""
    _, place_T, count_S = sample_T.unique(return_inverse=True, return_counts=True)
    sums_S = values_T.new_zeros(len(count_S)).index_add(0, place_T, values_T)
    means_S: Tensor = sums_S / count_S
    return means_S[place_T]


def covariances(logprobs_N: Tensor, advantages_N: Tensor) -> Tensor:
    """[N] each token's part in the covariance of log-prob and advantage: what the update takes from the entropy."""
    return (logprobs_N - logprobs_N.mean()) * (advantages_N - advantages_N.mean())


def token_loss(loss_T: Tensor, **facts_T: Tensor) -> TokenLoss:
    """The loss with facts that carry no gradient."""
    return TokenLoss(loss_T, {name: fact_T.detach().to(loss_T.dtype) for name, fact_T in facts_T.items()})
