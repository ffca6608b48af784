"""PPO (arXiv 1707.06347) with a critic, as ToolRL runs it: GAE at gamma = lambda = 1, k1 in the reward at 0.001."""

from functools import partial

from verl.algorithms.advantage import gae
from verl.algorithms.aggregate import Aggregation
from verl.algorithms.algorithm import Algorithm, KLPlacement, KLTerm
from verl.algorithms.policy_loss import clipped

PPO = Algorithm(
    name="ppo",
    paper="arXiv 1707.06347",
    advantage=partial(gae, gamma=1.0, lam=1.0),
    policy_loss=partial(clipped, clip_low=0.2, clip_high=0.2),
    aggregation=Aggregation.TOKEN_MEAN,
    kl=KLTerm(KLPlacement.REWARD, "k1", 0.001),
    entropy_coefficient=0.001,
    needs_critic=True,
)
