"""PPO (arXiv 1707.06347) with a critic, in ToolRL's setup (arXiv 2504.13958).

    delta_t = r_t + gamma * V_{t+1} - V_t;  A_t = delta_t + gamma * lam * A_{t+1}, whitened over the batch
    loss = mean over tokens of clip(A, p / p_old);  the critic's target is A_t + V_t

r_t is the episode reward on the last token, plus each turn's reward on that turn's last token. ToolRL uses
gamma = lam = 1, k1 in the reward at 0.001 and an entropy bonus of 0.001. Implementations differ in the tool tokens
between turns: OpenRLHF sets their values to 0 and runs GAE through them; here, as in veRL, GAE skips them.
`options.critic_lam` is another lambda for the critic's target, `options.length_alpha` one by length (see `vapo`).
"""

from functools import partial

import torch
from torch import Tensor

from verl.algorithms.algorithm import Algorithm, KLTerm
from verl.algorithms.estimators.advantage import gae
from verl.algorithms.names import KLPlacement


def clipped_value_loss(values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """([T] loss, [T] 1.0 where the clip was active): half the larger squared error of the value and the value clipped
    to within `clip` of the old one, as in PPO's reference code."""
    clipped_T = values_T.clamp(old_values_T - clip, old_values_T + clip)
    plain_T, bounded_T = (values_T - returns_T).square(), (clipped_T - returns_T).square()
    return 0.5 * torch.maximum(plain_T, bounded_T), (bounded_T > plain_T).to(values_T.dtype).detach()


PPO = Algorithm(
    name="ppo",
    paper="arXiv 1707.06347",
    advantage=partial(gae, gamma=1.0, lam=1.0),
    kl=KLTerm(KLPlacement.REWARD, "k1", 0.001),
    entropy_coefficient=0.001,
    needs_critic=True,
    takes_turn_rewards=True,
    needs_group=False,
)
