"""VAPO (ByteDance, arXiv 2504.05118): PPO with a critic for long responses.

    A_t = delta_t + lam * A_{t+1}, lam = 1 - 1 / (0.05 * length), whitened;  the critic's target has lam = 1
    loss = mean over tokens of clip(A, p / p_old), 0.2 below and 0.28 above, + 0.1 * mean over right tokens of -log p

A reward at the end fades over a long response with a fixed lambda, and a critic that learns from its own values keeps
their bias. Tokens of responses with a reward above `options.threshold`, 0 by default, are right; the mean is over those
of the mini-batch, whatever the aggregation. The authors sample several responses per prompt, without KL, and first
train the critic alone (`trainer.critic_warmup`). `critic_lam` and `length_alpha` are options of `ppo`, too. The length
of an episode is that of its trained tokens; up to 20 lambda is 0, so short responses need a larger `length_alpha`.
"""

from functools import partial

from torch import Tensor

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.cross_entropy import mean_weights
from verl.algorithms.estimators.advantage import gae
from verl.algorithms.losses.policy_loss import clipped


def right_tokens(rewards_N: Tensor, threshold: float = 0.0, nll_weight: float = 0.1) -> Tensor:
    """[N] nll_weight / number of right tokens on the right ones, 0 on the others."""
    return mean_weights(rewards_N > threshold, nll_weight)


VAPO = Algorithm(
    name="vapo",
    paper="arXiv 2504.05118",
    advantage=partial(gae, gamma=1.0, critic_lam=1.0, length_alpha=0.05),
    policy_loss=partial(clipped, clip_low=0.2, clip_high=0.28),
    likelihood=partial(right_tokens, nll_weight=0.1),
    needs_critic=True,
    needs_group=False,
    takes_turn_rewards=True,
)
