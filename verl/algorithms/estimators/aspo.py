"""ASPO, advantage shaping (arXiv 2508.19201): a bonus for early calls that cannot change the sign of an advantage.

    A = A_r + clip(delta * (p - mean(p)) / mean(l), -k * A_r, k * A_r) where A_r > 0 and a tool is called, else A_r
    A_r = (r - mean(group)) / (std(group) + 1e-6);  loss = mean over tokens of clip(A, p / p_old)

p is the position of the first call, l the length, in trained tokens; both means are over those rollouts of the group.
delta = -2 is negative, so earlier calls get more; k = 0.7. A reward for early calls would enter the group's mean and
std, and could make a right response worse than a wrong one. A call is what ends a turn before the last one.
"""

from functools import partial

import torch
from torch import Tensor

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.estimators.advantage import AdvantageInputs, Advantages, apply_per_group, group_normalized


def aspo(rollouts: AdvantageInputs, delta: float = -2.0, k: float = 0.7) -> Advantages:
    """GRPO's advantages with a bonus for the position of the first call, bounded by a share `k` of each."""
    assert rollouts.turns is not None
    first_B = torch.tensor([float((turns.turn_L == 0).sum()) for turns in rollouts.turns])
    calls_B = torch.tensor([len(turns.state_N) > 1 for turns in rollouts.turns])
    lengths_B = rollouts.lengths.to(first_B)

    def shaped(rewards_G: Tensor, first_G: Tensor, lengths_G: Tensor, calls_G: Tensor) -> Tensor:
        advantages_G = group_normalized(rewards_G)
        some_G = (advantages_G > 0) & calls_G
        bonus_G = delta * (first_G - first_G[some_G].mean()) / lengths_G[some_G].mean()
        bound_G = k * advantages_G.clamp(min=0.0)
        return torch.where(some_G, advantages_G + bonus_G.clamp(-bound_G, bound_G), advantages_G)

    shaped_B = apply_per_group(rollouts.group_B, shaped, rollouts.rewards, first_B, lengths_B, calls_B)
    return Advantages(rollouts.broadcast_to_tokens(shaped_B))


ASPO = Algorithm(
    name="aspo",
    paper="arXiv 2508.19201",
    advantage=partial(aspo, delta=-2.0, k=0.7),
    by_group=True,
    needs_turns=True,
)
