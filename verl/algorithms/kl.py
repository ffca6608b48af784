"""KL estimators: the divergence between two policies from the log-probs of sampled tokens (after J. Schulman).

With r = log p_ref - log p, for a token drawn from p:

    k1 = -r               unbiased, can be negative; its gradient has mean zero, so it belongs in the reward
    k2 = r^2 / 2          biased, low variance, with the right gradient
    k3 = e^r - r - 1      unbiased, never negative
    abs = |r|             not an estimator of KL; veRL has it

Shape legend: T tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.algorithms.names import KLEstimate

KLEstimator = Callable[[Tensor, Tensor], Tensor]

MAX_LOG_RATIO = 20.0
_MAX_K3 = 10.0


def k3(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """[T] e^r - r - 1, with the log ratio clamped to +-20 and the value to +-10 against outliers, as in veRL."""
    log_ratio_T = (ref_logprobs_T - logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (log_ratio_T.exp() - log_ratio_T - 1.0).clamp(-_MAX_K3, _MAX_K3)


KL_ESTIMATORS: Mapping[str, KLEstimator] = {
    KLEstimate.K1: lambda logprobs_T, ref_logprobs_T: logprobs_T - ref_logprobs_T,
    KLEstimate.K2: lambda logprobs_T, ref_logprobs_T: 0.5 * (logprobs_T - ref_logprobs_T).square(),
    KLEstimate.K3: k3,
    KLEstimate.ABS: lambda logprobs_T, ref_logprobs_T: (logprobs_T - ref_logprobs_T).abs(),
}


def apply_kl_penalty(
    rewards_T: Tensor, logprobs_T: Tensor, ref_logprobs_T: Tensor, coefficient: float, estimator: str = "k1"
) -> Tensor:
    """[T] token rewards minus coefficient * KL: the KL penalty in the reward (ToolRL, Ziegler et al. 2019)."""
    with torch.no_grad():
        return rewards_T - coefficient * KL_ESTIMATORS[estimator](logprobs_T, ref_logprobs_T)


@dataclass
class AdaptiveKL:
    """Adaptive KL coefficient, controlled toward a target (Ziegler et al. 2019, arXiv 1909.08593, section 2.2).

    coefficient *= 1 + clip(kl / target - 1, -0.2, 0.2) * episodes / horizon
    """

    coefficient: float
    target: float
    horizon: int = 10_000  # episodes; veRL's default

    def observe(self, divergence: float, num_episodes: int) -> None:
        """divergence: a step's mean KL"""
        error = min(max(divergence / self.target - 1.0, -0.2), 0.2)
        self.coefficient *= 1.0 + error * num_episodes / self.horizon
