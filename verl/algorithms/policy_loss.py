"""Policy losses, token by token; `aggregate.py` says how they become one number.

Every loss maps a `LossInputs` to a `TokenLoss`. All tensors are 1-D over the trained tokens of a pack. Shape legend: T
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What a policy loss sees of a pack."""

    logprobs_T: Tensor  # of the policy being trained; carries the gradient
    old_logprobs_T: Tensor  # of the policy the clip is measured from
    advantages_T: Tensor
    sample_T: Tensor  # which sample of the pack each token belongs to


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
    advantages_T = inputs.advantages_T
    log_ratio_T = (inputs.logprobs_T - inputs.old_logprobs_T).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio_T = log_ratio_T.exp()
    plain_T = -advantages_T * ratio_T
    bounded_T = -advantages_T * ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_T = torch.maximum(plain_T, bounded_T)
    facts = {"clip_fraction": bounded_T > plain_T, "ppo_kl": -log_ratio_T}
    if dual_clip is not None:
        ceiling_T = -advantages_T * dual_clip
        facts["dual_clip_fraction"] = (loss_T > ceiling_T) & (advantages_T < 0)
        loss_T = torch.where(advantages_T < 0, torch.minimum(loss_T, ceiling_T), loss_T)
    return TokenLoss(loss_T, {name: fact_T.detach().to(loss_T.dtype) for name, fact_T in facts.items()})
