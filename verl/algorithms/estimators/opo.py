"""OPO, on-policy learning with the optimal reward baseline (arXiv 2505.23585).

    b = sum of (length_i * r_i) / sum of length_i over the group;  A_i = r_i - b
    loss = mean over responses of the sum over their tokens of -A log p

The minimum-variance baseline weights rewards by the squared gradient norm of each response, which grows with its
length. The authors require exact on-policy training (one update per batch) and use neither KL nor an entropy bonus.
veRL's version has PPO's clip, which is inactive with one update per batch.
"""

from torch import Tensor

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.estimators.advantage import AdvantageInputs, Advantages, apply_per_group
from verl.algorithms.losses.policy_loss import policy_gradient
from verl.algorithms.names import Aggregation


def length_weighted_centered(rewards_G: Tensor, lengths_G: Tensor) -> Tensor:
    """[G] rewards minus their length-weighted mean; exactly zero for equal rewards; a group of one keeps its reward."""
    if rewards_G.numel() == 1:
        return rewards_G
    shifted_G = rewards_G - rewards_G[0]  # equal rewards then give exactly 0
    return shifted_G - (lengths_G * shifted_G).sum() / lengths_G.sum()


def opo(rollouts: AdvantageInputs) -> Advantages:
    advantages_B = apply_per_group(rollouts.group_B, length_weighted_centered, rollouts.rewards, rollouts.lengths)
    return Advantages(rollouts.broadcast_to_tokens(advantages_B))


OPO = Algorithm(
    name="opo",
    paper="arXiv 2505.23585",
    advantage=opo,
    by_group=True,
    policy_loss=policy_gradient,
    aggregation=Aggregation.SEQ_MEAN_TOKEN_SUM,
)
