"""pass@k policy optimization (arXiv 2503.19595): the group's objective is the reward of its best response.

    A_i = max(group) - max(group without i): r_1 - r_2 for the best response, 0 for all others
    loss = mean over tokens of clip(A, p / p_old)

With rewards of 0 and 1 only a single right response gets an advantage, which preserves exploration; k is the number of
responses to a prompt. Two equal best responses have advantage 0. By default veRL divides by the group's std, which the
paper does not; set `algorithm.options.divide_by_std=true` for veRL's.
"""

from functools import partial

import torch
from torch import Tensor

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.estimators.advantage import AdvantageInputs, Advantages, group_advantage

_EPSILON = 1e-6


def best_of_group(rewards_G: Tensor, divide_by_std: bool = False) -> Tensor:
    """[G] decrease of the group's maximum when each reward is left out."""
    if rewards_G.numel() == 1:
        return rewards_G
    top, second = rewards_G.topk(2).values
    gain_G = torch.where(rewards_G == top, top - second, 0.0)
    return gain_G / (rewards_G.std() + _EPSILON) if divide_by_std else gain_G


def pass_at_k(rollouts: AdvantageInputs, divide_by_std: bool = False) -> Advantages:
    return group_advantage(rollouts, partial(best_of_group, divide_by_std=divide_by_std))


PASS_AT_K = Algorithm(name="pass_at_k", paper="arXiv 2503.19595", advantage=pass_at_k, by_group=True)
