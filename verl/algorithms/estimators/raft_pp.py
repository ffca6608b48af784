"""RAFT++ (arXiv 2504.11343): only right responses are trained, with PPO's clip.

    A = 1 where r > 0, else 0
    loss = mean over tokens of clip(A, p / p_old)

RAFT is supervised learning of the policy's own right responses; the ratio and the clip make several updates possible.
The authors find it close to GRPO, whose advantage over it is that groups without a right response are left out. No
group is needed. `options.threshold` is the reward above which a response is right; set it for graded rewards. Tokens of
the others count in the mean, so a step's size grows with the share of right responses.
"""

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.estimators.advantage import AdvantageInputs, Advantages


def right_only(rollouts: AdvantageInputs, threshold: float = 0.0) -> Advantages:
    rewards_B = rollouts.rewards
    return Advantages(rollouts.broadcast_to_tokens((rewards_B > threshold).to(rewards_B.dtype)))


RAFT_PP = Algorithm(name="raft_pp", paper="arXiv 2504.11343", advantage=right_only, by_group=True, needs_group=False)
