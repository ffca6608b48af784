"""Off-policy correction of the engine-trainer mismatch: importance sampling weights and rejection sampling.

Engine and trainer differ in their numerics, or the engine's weights are stale. With p_engine the engine's probability
of a token and p_old the trainer's before the update (behavior and proximal policy of decoupled PPO, Hilton et al.,
arXiv 2110.00641), a token's policy loss is multiplied by a weight that carries no gradient:

    ratio      = p_old / p_engine
    level      token: the token's own ratio; sequence: the product over its sample; geometric: the geometric mean
    is_level   weight min(ratio, is_cap): truncated importance sampling, TIS (Ionides 2008)
    rejection  weight 0 unless lower <= ratio <= upper. IcePop (arXiv 2510.18855) at token level; sequence and geometric
               as in Liu, Li et al. 2025, "When Speed Kills Stability". With binary_kl the ratio is e^d, d the larger KL
               of both directions between "this token" and "another one" (KPop, ringtech.notion.site/kpop)
    veto       weight 0 for all tokens of a sample if one of them has a catastrophically small ratio

Sequence weights are unbiased, with a variance that grows with the length; token weights are biased, with bounded
variance. The loss's own ratio and its clip stay at p / p_old. KL, entropy, the cross-entropy and the critic's loss are
not weighted. Rejected tokens still count in the loss's denominators, as in those papers and in TRL; veRL removes them
from the response mask, which gives the other tokens more weight. In GMPO each token holds the loss of its whole sample,
so the sample gets the mean of its tokens' weights; veRL uses the geometric mean.

Shape legend: T trained tokens of a pack; samples are never split, so the split into packs changes nothing.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.algorithms.kl import MAX_LOG_RATIO, binary_kl, k3
from verl.algorithms.losses.policy_loss import sample_sums
from verl.algorithms.names import Level


@dataclass(frozen=True, slots=True)
class Correction:
    """Importance sampling and rejection settings; None disables a part. Bounds apply to ratios, not to log ratios."""

    is_level: Level | None = Level.TOKEN
    is_cap: float = 2.0  # upper bound of the weights
    rejection_level: Level | None = None
    rejection_lower: float = 0.5
    rejection_upper: float = 2.0
    token_veto: float | None = None  # token ratio below which the whole sample is rejected

    def __post_init__(self) -> None:
        assert self.is_level not in (Level.GEOMETRIC, Level.BINARY_KL), "not an importance weight"
        assert self.is_cap >= 1.0 and self.rejection_lower <= 1.0 <= self.rejection_upper, (
            "the bounds must include 1, the ratio of equal policies"
        )


UNBOUNDED = Correction(is_cap=math.inf)  # plain token ratios, for the metrics when nothing is corrected


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """Factors of the tokens' policy loss, and how they came about."""

    weight_T: Tensor
    truncated_T: Tensor  # bool: the ratio was above is_cap
    masked_T: Tensor  # bool: rejected by bounds or veto


@torch.no_grad()
def token_weights(
    correction: Correction, logprobs_T: Tensor, rollout_logprobs_T: Tensor, sample_T: Tensor
) -> TokenWeights:
    """Importance weights of a pack's tokens.

    logprobs_T: the trainer's, before the update
    rollout_logprobs_T: the engine's at the sampling temperature; NaN at tokens that it did not sample, whose own ratio
        is 1 (they still get their sample's weight at sequence level)
    sample_T: index of the sample that each token belongs to
    """
    sampled_T = ~rollout_logprobs_T.isnan()
    token_T = torch.where(sampled_T, logprobs_T - rollout_logprobs_T, 0.0)

    def sums(values_T: Tensor) -> Tensor:
        return sample_sums(values_T.double(), sample_T)

    def ratios(level: Level) -> Tensor:
        if level is Level.BINARY_KL:
            engine_T = logprobs_T - token_T
            log_T = torch.maximum(binary_kl(logprobs_T, engine_T), binary_kl(engine_T, logprobs_T))
        else:
            log_T = token_T if level is Level.TOKEN else sums(token_T)
        if level is Level.GEOMETRIC:
            log_T = log_T / sums(sampled_T).clamp(min=1.0)
        return log_T.to(logprobs_T.dtype).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()

    ratio_T = torch.ones_like(logprobs_T) if correction.is_level is None else ratios(correction.is_level)
    masked_T = torch.zeros_like(sampled_T)
    if correction.rejection_level is not None:
        bounded_T = ratios(correction.rejection_level)
        masked_T = (bounded_T < correction.rejection_lower) | (bounded_T > correction.rejection_upper)
    if correction.token_veto is not None:
        masked_T = masked_T | (sums(token_T < math.log(correction.token_veto)) > 0)
    weight_T = ratio_T.clamp(max=correction.is_cap).masked_fill(masked_T, 0.0)
    return TokenWeights(weight_T, ratio_T > correction.is_cap, masked_T)


def engine_kl(logprobs_T: Tensor, rollout_logprobs_T: Tensor) -> Tensor:
    """[T] k3 estimate of KL(engine, trainer); 0 at tokens that the engine did not sample."""
    return k3(rollout_logprobs_T, logprobs_T).nan_to_num(0.0)


def effective_sample_size(mean: float, mean_square: float) -> float:
    """Kish's effective sample size, E[w]^2 / E[w^2], as a share of all tokens: 1 if all weights are equal."""
    return mean * mean / mean_square if mean_square > 0.0 else 0.0
