"""Skywork-OR1 (arXiv 2505.22312): GRPO with an entropy bonus that adapts toward a target entropy.

    A = (r - mean(group)) / (std(group) + 1e-6)
    loss = mean over tokens of clip(A, p / p_old) - bonus * entropy
    after each step: c rises by 0.005 if the entropy was at most 0.2 nats, else falls by it, within 0 and 1;
    the next step's bonus is c if it was at most 0.2 nats, else 0

A fixed coefficient suits one model and data set: too small, the entropy collapses; too large, it explodes. Here the
bonus is on while the entropy is low. Groups of equal rewards are dropped, without new prompts. c begins with
`algorithm.entropy_coefficient`; `algorithm.entropy_target` gives any algorithm such a bonus. The authors also train in
stages of growing length, on policy, without KL. TRL has the same controller (`use_adaptive_entropy`).
"""

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.estimators.advantage import grpo
from verl.algorithms.filters import zero_variance

SKYWORK = Algorithm(
    name="skywork",
    paper="arXiv 2505.22312",
    advantage=grpo,
    by_group=True,
    filters=(zero_variance,),
    entropy_target=0.2,
)
