"""GRPO, group relative policy optimisation (DeepSeekMath, arXiv 2402.03300).

A = (r - mean(group)) / std(group) on every token of a reply, PPO's clip, every reply weighing the same, k3 in the loss.
"""

from functools import partial

from verl.algorithms.advantage import grpo
from verl.algorithms.aggregate import Aggregation
from verl.algorithms.algorithm import Algorithm, KLPlacement, KLTerm
from verl.algorithms.policy_loss import clipped

GRPO = Algorithm(
    name="grpo",
    paper="arXiv 2402.03300",
    advantage=grpo,
    policy_loss=partial(clipped, clip_low=0.2, clip_high=0.2),
    aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN,
    kl=KLTerm(KLPlacement.LOSS, "k3", 0.04),
)
