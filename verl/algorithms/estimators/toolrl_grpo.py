"""GRPO with the settings of ToolRL's script (arXiv 2504.13958; the paper states "no KL", but the code keeps it).

    r = reward - 0.001 * sum over tokens of k1(p_old, p_ref);  A = (r - mean(group)) / (std(group) + 1e-6)
    loss = mean over tokens of [clip(A, p / p_old) - 0.001 * entropy]

KL is a penalty in the reward, so it enters the group's mean and std.
"""

from verl.algorithms.algorithm import Algorithm, KLTerm
from verl.algorithms.estimators.advantage import grpo
from verl.algorithms.names import KLPlacement

TOOLRL_GRPO = Algorithm(
    name="toolrl_grpo",
    paper="arXiv 2504.13958",
    advantage=grpo,
    by_group=True,
    kl=KLTerm(KLPlacement.REWARD, "k1", 0.001),
    entropy_coefficient=0.001,
)
