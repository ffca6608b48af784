"""MaxRL, maximum likelihood reinforcement learning (arXiv 2602.02710): GRPO divided by the mean instead of the std.

    A = (r - mean(group)) / mean(group), 0 if the mean is not positive
    loss = mean over tokens of clip(A, p / p_old)

With rewards of 0 and 1 its expectation is the gradient of log(chance of success), expanded to as many terms as the
group has responses. So a right response counts for more, the rarer it is. Rewards must not be negative: ToolRL's are.
The formula is that of prime-rl and SkyRL, too.
"""

import torch
from torch import Tensor

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.estimators.advantage import AdvantageInputs, Advantages, compared, group_advantage


def divided_by_mean(rewards_G: Tensor) -> Tensor:
    """[G] a group of one has the advantage 0."""
    mean = float(rewards_G.double().mean())
    return compared(rewards_G, False) / mean if mean > 0.0 else torch.zeros_like(rewards_G)


def max_rl(rollouts: AdvantageInputs) -> Advantages:
    return group_advantage(rollouts, divided_by_mean)


MAX_RL = Algorithm(name="max_rl", paper="arXiv 2602.02710", advantage=max_rl, by_group=True)
