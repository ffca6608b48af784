"""On-policy distillation (https://thinkingmachines.ai/blog/on-policy-distillation/; Qwen3, arXiv 2505.09388).

    A_t = teacher.weight * (log p_teacher(token) - log p_old(token))
    loss = mean over tokens of clip(A, p / p_old)

The tokens are sampled by the policy, so that -A_t / weight is an unbiased estimate of the KL divergence from the policy
to the teacher (reverse KL) in the state of each token. The reward is logged and not learned from, and one response to a
prompt suffices. Any other algorithm with `teacher.path` adds the same A_t to the advantages of its own. With
`teacher.top_k` the divergence over the teacher's likeliest tokens is in the loss instead; veRL has that of the other
direction (`forward_kl_topk`). With `teacher.path=self` the policy is its own teacher, and sees the gold response.
"""

import torch

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.estimators.advantage import AdvantageInputs, Advantages


def without_reward(rollouts: AdvantageInputs) -> Advantages:
    return Advantages([torch.zeros_like(rewards_L) for rewards_L in rollouts.token_rewards])


OPD = Algorithm(
    name="opd",
    paper="arXiv 2505.09388",
    advantage=without_reward,
    needs_group=False,
    takes_turn_rewards=True,  # as little as it takes others
    by_group=True,
    teacher_weight=1.0,
)
