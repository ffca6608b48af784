"""GMPO, geometric-mean policy optimization (arXiv 2507.20673): robust to outliers among a response's ratios.

    w_t = log(p / p_old), clipped above at 0.4 where A > 0 and below at -0.4 where A < 0 (PPO's clip, in log space)
    loss = mean over responses of -A * exp(mean over the response's tokens of w_t);  A as in GRPO

The authors clip per token at e^-0.4 and e^0.4 and use no KL. Their code and veRL's divide by all rows of the batch,
including empty ones; here samples without trained tokens do not count as responses.
"""

from functools import partial

import torch

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.estimators.advantage import grpo
from verl.algorithms.losses.policy_loss import LossInputs, TokenLoss, log_ratios, sample_means, token_loss
from verl.algorithms.names import Aggregation


def geometric_mean(inputs: LossInputs, clip_low: float = 0.4, clip_high: float = 0.4) -> TokenLoss:
    """Each token holds the loss of its whole sample. clip_low, clip_high: bounds of the log ratio"""
    advantages_T, log_ratio_T = sample_means(inputs.advantages_T, inputs.sample_T), log_ratios(inputs)
    bounded_T = log_ratio_T.clamp(-clip_low, clip_high)
    low_T, high_T = torch.minimum(log_ratio_T, bounded_T), torch.maximum(log_ratio_T, bounded_T)
    pessimistic_T = torch.where(advantages_T > 0, low_T, high_T)
    ratio_T = sample_means(pessimistic_T, inputs.sample_T).exp()
    loss_T = -advantages_T * ratio_T
    return token_loss(loss_T, ratio_T, clip_fraction=log_ratio_T != pessimistic_T, ppo_kl=-log_ratio_T)


GMPO = Algorithm(
    name="gmpo",
    paper="arXiv 2507.20673",
    advantage=grpo,
    by_group=True,
    policy_loss=partial(geometric_mean, clip_low=0.4, clip_high=0.4),
    aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN,
)
