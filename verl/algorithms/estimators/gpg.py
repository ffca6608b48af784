"""GPG, group policy gradient (arXiv 2504.02546).

    A = alpha * (r - mean(group)),  alpha = B / (B - M)
    loss = mean over tokens of -A log p

B: responses of the batch; M: responses in groups whose rewards are all equal, which have zero gradient and would dilute
the others'. No clip, no KL, no division by the std. veRL uses alpha = B / (number of nonzero rewards), which is not the
paper's: it depends on the scale of graded rewards and on a constant offset.
"""

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.estimators.advantage import AdvantageInputs, Advantages, apply_per_group, group_normalized
from verl.algorithms.losses.policy_loss import policy_gradient


def gpg(rollouts: AdvantageInputs) -> Advantages:
    """Group-centered rewards, scaled up to compensate for the responses with zero gradient."""
    group_B = rollouts.group_B
    centered_B = apply_per_group(group_B, lambda each_G: group_normalized(each_G, False), rollouts.rewards)
    nonzero_B = apply_per_group(group_B, lambda each_G: each_G.any().to(each_G.dtype).expand(len(each_G)), centered_B)
    alpha = len(centered_B) / nonzero_B.sum().clamp(min=1)
    return Advantages(rollouts.broadcast_to_tokens(alpha * centered_B))


GPG = Algorithm(name="gpg", paper="arXiv 2504.02546", advantage=gpg, policy_loss=policy_gradient)
