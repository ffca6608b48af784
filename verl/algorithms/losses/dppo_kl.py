"""DPPO with KL (arXiv 2602.04879): the trust region of `dppo_tv`, with the KL divergence of two events.

    d = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)):  "this token or another"
    kept: d <= 0.05, and every token whose probability moves back: p <= p_old where A > 0, p >= p_old elsewhere
    loss = mean over tokens of -stop(min(p / p_old, 20)) * A * log p on kept tokens, 0 on the others;  A as in GRPO

The threshold is that of SkyRL's experiments. p_old has the engine's log-probs (see `dppo_tv`).
"""

from functools import partial

import torch

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.estimators.advantage import grpo
from verl.algorithms.kl import binary_kl
from verl.algorithms.losses.policy_loss import LossInputs, TokenLoss, within_trust_region
from verl.algorithms.names import OldLogprobs


def within_binary_kl(
    inputs: LossInputs, clip_low: float = 0.05, clip_high: float = 0.05, ratio_cap: float = 20.0
) -> TokenLoss:
    """clip_low, clip_high: the bound of the divergence where the probability falls, and rises"""
    logprobs_T, old_T = inputs.logprobs_T.detach(), inputs.old_logprobs_T
    divergence_T = binary_kl(old_T, logprobs_T)
    up_T, down_T = (
        (divergence_T <= clip_high) | (logprobs_T <= old_T),
        (divergence_T <= clip_low) | (logprobs_T >= old_T),
    )
    return within_trust_region(inputs, torch.where(inputs.advantages_T > 0, up_T, down_T), ratio_cap)


DPPO_KL = Algorithm(
    name="dppo_kl",
    paper="arXiv 2602.04879",
    advantage=grpo,
    by_group=True,
    policy_loss=partial(within_binary_kl, clip_low=0.05, clip_high=0.05),
    old_logprobs=OldLogprobs.ROLLOUT,
)
