"""GPG, group policy gradient (arXiv 2504.02546).

    A = alpha * (r - mean(group)),  alpha = B / (B - M)
    loss = mean over tokens of -A log p

B: responses of the batch; M: those in groups whose rewards are all equal, which have no gradient and would dilute the
others'. No clip, no KL, no division by the std. veRL takes alpha = B / (number of rewards that are not 0), which is
not the paper's: it would grow with graded rewards, and change with a shift of all rewards.
"""

from verl.algorithms.advantage import AdvantageInputs, Advantages, apply_per_group, group_normalized
from verl.algorithms.aggregate import Aggregation
from verl.algorithms.algorithm import Algorithm
from verl.algorithms.policy_loss import policy_gradient


def gpg(rollouts: AdvantageInputs) -> Advantages:
    """Rewards less the group's mean, scaled up for the responses without a gradient."""
    centred_B = apply_per_group(rollouts.group_B, lambda each_G: group_normalized(each_G, False), rollouts.rewards)
    learns_B = apply_per_group(
        rollouts.group_B, lambda each_G: each_G.any().to(each_G.dtype).expand(len(each_G)), centred_B
    )
    alpha = len(centred_B) / learns_B.sum().clamp(min=1)
    return Advantages(rollouts.broadcast_to_tokens(alpha * centred_B))


GPG = Algorithm(
    name="gpg",
    paper="arXiv 2504.02546",
    advantage=gpg,
    policy_loss=policy_gradient,
    aggregation=Aggregation.TOKEN_MEAN,
)
