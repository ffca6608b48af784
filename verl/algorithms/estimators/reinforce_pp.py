"""REINFORCE++ (arXiv 2501.03262): PPO's loss without a critic, its baseline the mean of the whole batch.

    r_t = -beta * k1_t, plus the reward on the last token;  R_t = r_t + gamma * R_{t+1}
    A_t = R_t, whitened over all trained tokens of the batch
    loss = mean over tokens of clip(A, p / p_old)

The authors use gamma = 1, clip 0.2, KL in the reward at 0.001 for mathematics (0.01 otherwise). No group is needed: one
response per prompt is enough. Implementations differ on tool tokens: versions of veRL reset the return at each, and
OpenRLHF includes their KL in it; here they are skipped.
"""

from functools import partial

from verl.algorithms.algorithm import Algorithm, KLTerm
from verl.algorithms.estimators.advantage import AdvantageInputs, Advantages, returns_to_go, whitened
from verl.algorithms.names import KLPlacement


def reinforce_pp(rollouts: AdvantageInputs, gamma: float = 1.0) -> Advantages:
    """Discounted return of every token, whitened over the batch."""
    return whitened([returns_to_go(rewards_L, gamma) for rewards_L in rollouts.token_rewards])


REINFORCE_PP = Algorithm(
    name="reinforce_pp",
    paper="arXiv 2501.03262",
    advantage=partial(reinforce_pp, gamma=1.0),
    kl=KLTerm(KLPlacement.REWARD, "k1", 0.001),
    needs_group=False,
)
