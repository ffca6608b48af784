"""Dr.GRPO, GRPO done right (arXiv 2503.20783): without the two divisions that bend the gradient.

    A = r - mean(group)
    loss = mean over responses of the sum over their tokens of clip(A, p / p_old) / longest response that is allowed

One division favours long wrong responses, the other prompts that are nearly always or never solved. Its authors take
clip 0.2 and no KL. The divisor is a constant (`algorithm.aggregation_length`; data.max_response_length if left out),
so that every token weighs the same in every batch. Peers differ: veRL divides by the padded length of the batch if
not told otherwise, TRL counts rows without tokens as responses, OpenRLHF has the advantage alone.
"""

from functools import partial

from verl.algorithms.advantage import AdvantageInputs, Advantages, group_advantage, group_normalized
from verl.algorithms.aggregate import Aggregation
from verl.algorithms.algorithm import Algorithm
from verl.algorithms.policy_loss import clipped


def group_centred(rollouts: AdvantageInputs) -> Advantages:
    """Rewards less the mean of their group, not divided by anything."""
    return group_advantage(rollouts, partial(group_normalized, divide_by_std=False))


DR_GRPO = Algorithm(
    name="dr_grpo",
    paper="arXiv 2503.20783",
    advantage=group_centred,
    policy_loss=partial(clipped, clip_low=0.2, clip_high=0.2),
    aggregation=Aggregation.SEQ_MEAN_TOKEN_SUM_NORM,
)
