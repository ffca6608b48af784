"""Off-policy correction: what the engine sampled counts as if the trainer's policy had sampled it.

Engine and trainer differ, by their arithmetic or because the engine's weights are older. With p_engine the engine's
probability of a token and p_old the trainer's before the update (behaviour and proximal policy of decoupled PPO, Hilton
et al., arXiv 2110.00641), a token's policy loss is multiplied by a weight that carries no gradient:

    ratio   = p_old / p_engine
    level   of a ratio; token: the token's own; sequence: the product over its sample; geometric: the mean of that
    weight  min(ratio, upper): truncated importance sampling (Ionides 2008)
    mask    weight 0 unless lower <= ratio <= upper. IcePop (arXiv 2510.18855) by tokens; sequence and geometric as in
            Liu, Li et al. 2025, "When Speed Kills Stability"
    veto    weight 0 for all tokens of a sample, one of which has a catastrophically small ratio

Weights of a sequence are unbiased, and their variance grows with its length; those of tokens are bounded in variance
and biased. The loss's own ratio stays p / p_old, and its clip with it. KL, entropy and the critic's loss are not
weighted. Tokens that are masked count on in the loss's denominators, as in those papers and in TRL; veRL takes them out
of the mask that it averages over, which makes the others count for more. GMPO's tokens hold the loss of their whole
sample, which so gets the mean of its tokens' weights; veRL takes the geometric mean.

Shape legend: T trained tokens of a pack; a sample is in one pack as a whole, so the cut into packs changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from verl.algorithms.kl import MAX_LOG_RATIO, k3


class Level(StrEnum):
    """What a ratio is that of. GEOMETRIC, the mean of a sample's ratios, is for masks alone."""

    TOKEN = "token"
    SEQUENCE = "sequence"
    GEOMETRIC = "geometric"


@dataclass(frozen=True, slots=True)
class Correction:
    """Which weights and masks; None for none of them. Bounds hold for ratios, not for their logs."""

    is_level: Level | None = Level.TOKEN
    is_cap: float = 2.0  # of weights
    rejection_level: Level | None = None
    rejection_lower: float = 0.5
    rejection_upper: float = 2.0
    token_veto: float | None = None  # a token's ratio below which its sample is left out

    def __post_init__(self) -> None:
        assert self.is_level is not Level.GEOMETRIC, "a mean of ratios corrects nothing"
        assert self.is_cap >= 1.0 and self.rejection_lower <= 1.0 <= self.rejection_upper, (
            "policies that agree have the ratio 1"
        )


UNBOUNDED = Correction(is_cap=math.inf)  # plain token ratios, which are told where nothing is corrected


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """What each token's policy loss is multiplied by, and why."""

    weight_T: Tensor
    truncated_T: Tensor  # bool: its ratio was above the bound of weights
    masked_T: Tensor  # bool: left out by mask or veto


@torch.no_grad()
def token_weights(
    correction: Correction, logprobs_T: Tensor, rollout_logprobs_T: Tensor, sample_T: Tensor
) -> TokenWeights:
    """The weights of a pack's tokens.

    logprobs_T: the trainer's, before the update
    rollout_logprobs_T: the engine's at the temperature of sampling; NaN at tokens that it did not sample, whose own
        ratio is 1 (as members of their sample they share in its weight)
    sample_T: which sample each token belongs to
    """
    sampled_T = ~rollout_logprobs_T.isnan()
    token_T = torch.where(sampled_T, logprobs_T - rollout_logprobs_T, 0.0)

    def of_sample(values_T: Tensor) -> Tensor:
        sums_T: Tensor = torch.bincount(sample_T, values_T.double())[sample_T]
        return sums_T

    def ratios(level: Level) -> Tensor:
        log_T = token_T if level is Level.TOKEN else of_sample(token_T)
        if level is Level.GEOMETRIC:
            log_T = log_T / of_sample(sampled_T).clamp(min=1.0)
        return log_T.to(logprobs_T.dtype).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()

    ratio_T = torch.ones_like(logprobs_T) if correction.is_level is None else ratios(correction.is_level)
    masked_T = torch.zeros_like(sampled_T)
    if correction.rejection_level is not None:
        bounded_T = ratios(correction.rejection_level)
        masked_T = (bounded_T < correction.rejection_lower) | (bounded_T > correction.rejection_upper)
    if correction.token_veto is not None:
        masked_T = masked_T | (of_sample(token_T < math.log(correction.token_veto)) > 0)
    weight_T = ratio_T.clamp(max=correction.is_cap).masked_fill(masked_T, 0.0)
    return TokenWeights(weight_T, ratio_T > correction.is_cap, masked_T)


def engine_kl(logprobs_T: Tensor, rollout_logprobs_T: Tensor) -> Tensor:
    """[T] k3 of the engine's policy from the trainer's; 0 at tokens that the engine did not sample."""
    return k3(rollout_logprobs_T, logprobs_T).nan_to_num(0.0)


def effective_sample_size(mean: float, mean_square: float) -> float:
    """Kish's effective sample size, E[w]^2 / E[w^2], as a share of all tokens: 1 where all weigh the same."""
    return mean * mean / mean_square if mean_square > 0.0 else 0.0
