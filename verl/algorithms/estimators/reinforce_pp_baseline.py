"""REINFORCE++-baseline (arXiv 2501.03262) in ZeroTIR's setup (arXiv 2505.07773).

    A = r - mean(group), whitened over all trained tokens of the batch
    loss = mean over tokens of clip(A, p / p_old), clip 0.22 / 0.28, dual clip 3, no KL

The paper adds KL in the loss (k2) if there is a reference model; ZeroTIR has none. OpenRLHF whitens with the biased
variance, veRL and this implementation with the unbiased one.
"""

from functools import partial

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.estimators.advantage import AdvantageInputs, Advantages, whitened
from verl.algorithms.estimators.dr_grpo import group_centered
from verl.algorithms.losses.policy_loss import clipped


def reinforce_pp_baseline(rollouts: AdvantageInputs) -> Advantages:
    """r - mean(group) on every token, whitened over the trained tokens; a group of one keeps its reward, as in veRL."""
    return whitened(group_centered(rollouts).advantages)


REINFORCE_PP_BASELINE = Algorithm(
    name="reinforce_pp_baseline",
    paper="arXiv 2501.03262",
    advantage=reinforce_pp_baseline,
    policy_loss=partial(clipped, clip_low=0.22, clip_high=0.28, dual_clip=3.0),
)
