"""KL estimators: the divergence between two policies from the log-probs of sampled tokens (after J. Schulman).

With r = log p_ref - log p, for a token drawn from p:

    k1 = -r               unbiased, can be negative; its gradient has mean zero, so it belongs in the reward
    k2 = r^2 / 2          biased, low variance, with the right gradient
    k3 = e^r - r - 1      unbiased, never negative
    abs = |r|             not an estimator of KL; veRL has it
    unbiased_k3           k3 * p / p_old in the loss, so that the gradient is that of KL (`loss_divergence`)

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
_REST = 1e-8


def k3(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """[T] e^r - r - 1, with the log ratio clamped to +-20 and the value to +-10 against outliers, as in veRL."""
    log_ratio_T = (ref_logprobs_T - logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (log_ratio_T.exp() - log_ratio_T - 1.0).clamp(-_MAX_K3, _MAX_K3)


def binary_kl(logprobs_T: Tensor, other_logprobs_T: Tensor) -> Tensor:
    """[T] KL(p, q) of the two events "this token" and "another one": p log(p / q) + (1 - p) log((1 - p) / (1 - q)).

    It bounds that of the whole distributions from below. 1e-8 is added to 1 - p and 1 - q, as in veRL.
    """
    p_T, q_T = logprobs_T.exp(), other_logprobs_T.exp()
    rest_T = (1.0 - p_T) * ((1.0 - p_T + _REST) / (1.0 - q_T + _REST)).log()
    return p_T * (logprobs_T - other_logprobs_T) + rest_T


KL_ESTIMATORS: Mapping[str, KLEstimator] = {
    KLEstimate.K1: lambda logprobs_T, ref_logprobs_T: logprobs_T - ref_logprobs_T,
    KLEstimate.K2: lambda logprobs_T, ref_logprobs_T: 0.5 * (logprobs_T - ref_logprobs_T).square(),
    KLEstimate.K3: k3,
    KLEstimate.ABS: lambda logprobs_T, ref_logprobs_T: (logprobs_T - ref_logprobs_T).abs(),
    KLEstimate.UNBIASED_K3: k3,  # without its ratio, which is 1 where the policy is the one that has sampled
}


def loss_divergence(estimator: str, logprobs_T: Tensor, ref_logprobs_T: Tensor, old_logprobs_T: Tensor) -> Tensor:
    """[T] the KL estimate of a loss.

    With UNBIASED_K3 it is multiplied by p / p_old, which carries its gradient (DeepSeek-V3.2, arXiv 2512.02556): the
    tokens are drawn from p_old, and the gradient of k3 alone is that of KL(p_ref, p).
    """
    divergence_T = KL_ESTIMATORS[estimator](logprobs_T, ref_logprobs_T)
    if estimator == KLEstimate.UNBIASED_K3:
        log_ratio_T = (logprobs_T - old_logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return divergence_T * log_ratio_T.exp()
    return divergence_T


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
