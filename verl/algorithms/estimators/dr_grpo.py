"""Dr.GRPO, GRPO done right (arXiv 2503.20783): without the two divisions that bias the gradient.

    A = r - mean(group)
    loss = mean over responses of the sum over their tokens of clip(A, p / p_old) / max response length

One division favors long wrong responses, the other prompts that are nearly always or never solved. The authors use
clip 0.2 and no KL. The divisor is a constant (`algorithm.aggregation_length`, default data.max_response_length), so
every token has the same weight in every batch. Other implementations: veRL divides by the padded length of the batch
by default, TRL counts rows without tokens as responses, OpenRLHF has the advantage only.
"""

from functools import partial

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.estimators.advantage import AdvantageInputs, Advantages, group_advantage, group_normalized
from verl.algorithms.names import Aggregation


def group_centered(rollouts: AdvantageInputs) -> Advantages:
    return group_advantage(rollouts, partial(group_normalized, divide_by_std=False))


DR_GRPO = Algorithm(
    name="dr_grpo",
    paper="arXiv 2503.20783",
    advantage=group_centered,
    by_group=True,
    aggregation=Aggregation.SEQ_MEAN_TOKEN_SUM_NORM,
)
