"""RLOO, REINFORCE with a leave-one-out baseline (arXiv 2402.14740).

    A_i = r_i - mean of the other rewards of the group = n / (n - 1) * (r_i - mean(group))
    loss = mean over responses of the sum over their tokens of -A log p

A response is one action: its reward includes the KL of all its tokens (k1), and nothing is clipped. The authors use 2
or 4 responses per prompt, one update per batch, and KL at 0.03 (TL;DR). Other implementations: veRL combines the same
advantage with PPO's clip and a token mean, TRL clips the ratio of whole responses. With one update per batch all three
have the same gradient up to its scale.
"""

from torch import Tensor

from verl.algorithms.algorithm import Algorithm, KLTerm
from verl.algorithms.estimators.advantage import AdvantageInputs, Advantages, group_advantage, group_normalized
from verl.algorithms.losses.policy_loss import policy_gradient
from verl.algorithms.names import Aggregation, KLPlacement


def rloo(rollouts: AdvantageInputs) -> Advantages:
    """Each reward minus the mean of the others, on every token; a group of one keeps its reward."""

    def leave_one_out(rewards_G: Tensor) -> Tensor:
        n = rewards_G.numel()
        return group_normalized(rewards_G, divide_by_std=False) * (n / max(n - 1, 1))

    return group_advantage(rollouts, leave_one_out)


RLOO = Algorithm(
    name="rloo",
    paper="arXiv 2402.14740",
    advantage=rloo,
    by_group=True,
    policy_loss=policy_gradient,
    aggregation=Aggregation.SEQ_MEAN_TOKEN_SUM,
    kl=KLTerm(KLPlacement.REWARD, "k1", 0.03),
)
