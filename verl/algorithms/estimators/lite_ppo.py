"""Lite PPO (arXiv 2508.08221): the mean of the group, the standard deviation of the batch.

    A = (r - mean(group)) / (std(batch) + 1e-6)
    loss = mean over tokens of clip(A, p / p_old)

The std is that of all rewards of the step. So a group of nearly equal rewards is not blown up, and easy and hard
prompts have one scale. The authors find that this and the token mean are enough for a base model, without critic and
KL. TRL (`scale_rewards="batch"`) adds 1e-4 to the std.
"""

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.estimators.advantage import AdvantageInputs, Advantages, apply_per_group, group_normalized

_EPSILON = 1e-6


def lite_ppo(rollouts: AdvantageInputs) -> Advantages:
    """A batch of one response has no std and is not divided."""
    rewards_B = rollouts.rewards
    centered_B = apply_per_group(rollouts.group_B, lambda each_G: group_normalized(each_G, False), rewards_B)
    std = float(rewards_B.double().std()) if len(rewards_B) > 1 else 1.0
    return Advantages(rollouts.broadcast_to_tokens(centered_B / (std + _EPSILON)))


LITE_PPO = Algorithm(name="lite_ppo", paper="arXiv 2508.08221", advantage=lite_ppo)
