"""DPPO with total variation (arXiv 2602.04879): a trust region of probabilities in place of PPO's clip of the ratio.

    kept: p - p_old <= 0.2 where A > 0, p - p_old >= -0.2 elsewhere
    loss = mean over tokens of -stop(min(p / p_old, 20)) * A * log p on kept tokens, 0 on the others;  A as in GRPO

PPO's clip holds rare tokens, whose ratios are large, and lets frequent ones go far. Here p is the probability of the
sampled token: |p - p_old| is the total variation of "this token or another". p_old is the policy that has sampled, with
the engine's log-probs, as the authors have it. The thresholds are prime-rl's; `algorithm.clip_low` and `clip_high` set
them. veRL and SkyRL have this loss, and prime-rl beside a KL penalty (see `ipo`).
"""

from functools import partial

import torch

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.estimators.advantage import grpo
from verl.algorithms.losses.policy_loss import LossInputs, TokenLoss, within_trust_region
from verl.algorithms.names import OldLogprobs


def within_total_variation(
    inputs: LossInputs, clip_low: float = 0.2, clip_high: float = 0.2, ratio_cap: float = 20.0
) -> TokenLoss:
    """clip_low, clip_high: how far the probability may fall, and rise"""
    change_T = (inputs.logprobs_T.exp() - inputs.old_logprobs_T.exp()).detach()
    kept_T = torch.where(inputs.advantages_T > 0, change_T <= clip_high, change_T >= -clip_low)
    return within_trust_region(inputs, kept_T, ratio_cap)


DPPO_TV = Algorithm(
    name="dppo_tv",
    paper="arXiv 2602.04879",
    advantage=grpo,
    by_group=True,
    policy_loss=partial(within_total_variation, clip_low=0.2, clip_high=0.2),
    old_logprobs=OldLogprobs.ROLLOUT,
)
