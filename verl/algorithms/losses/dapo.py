"""DAPO, decoupled clip and dynamic sampling (arXiv 2503.14476).

    r = score + overlong penalty;  A = (r - mean(group)) / (std(group) + 1e-6)
    loss = mean over tokens of clip(A, p / p_old), 0.2 below and 0.28 above (clip-higher)

Dynamic sampling: groups whose scores are all equal are dropped, and more prompts are drawn until the batch is full.
The authors run 512 prompts with 16 responses, 16 updates, no KL, an overlong buffer of 4,096 before 20,480 tokens, and
at most 10 rounds. They draw three batches at once and discard the surplus; here each round draws only the missing
prompts. They filter by accuracy, which is equivalent for scores of 0 or 1.
"""

from functools import partial

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.estimators.advantage import grpo
from verl.algorithms.filters import zero_variance
from verl.algorithms.losses.policy_loss import clipped
from verl.algorithms.overlong import Overlong

DAPO = Algorithm(
    name="dapo",
    paper="arXiv 2503.14476",
    advantage=grpo,
    by_group=True,
    policy_loss=partial(clipped, clip_low=0.2, clip_high=0.28),
    filters=(zero_variance,),
    max_resample_rounds=10,
    overlong=Overlong(),
)
