"""GRPO-RoC, resample on correct (rStar2-Agent, arXiv 2508.20722): right rollouts with fewer tool errors are trained.

    of a group's rollouts half are kept: right and wrong ones in their proportion, of the right ones those with the
    fewest tool errors (`resample_on_correct`);  A = (r - mean(kept)) / (std(kept) + 1e-6)
    loss = mean over tokens of clip(A, p / p_old), 0.2 below and 0.28 above

With a reward of the answer alone, calls that fail on the way to a right one are learned with it. The authors sample 32
rollouts and keep 16, at least 2 of each kind, without KL and entropy bonus. Their code keeps the rollouts with the
lowest penalty, as here, where the paper draws them by it. It also penalizes repeated answer tags, which are those of
its own format. `rollout.n` counts the rollouts that are sampled.
"""

from functools import partial

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.estimators.advantage import grpo
from verl.algorithms.filters import resample_on_correct
from verl.algorithms.losses.policy_loss import clipped

GRPO_ROC = Algorithm(
    name="grpo_roc",
    paper="arXiv 2508.20722",
    advantage=grpo,
    by_group=True,
    policy_loss=partial(clipped, clip_low=0.2, clip_high=0.28),
    filters=(resample_on_correct,),
)
