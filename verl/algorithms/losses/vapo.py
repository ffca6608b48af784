"""VAPO (ByteDance, arXiv 2504.05118): PPO with a critic for long responses.

    A_t = delta_t + lam * A_{t+1}, lam = 1 - 1 / (0.05 * length), whitened;  the critic's target has lam = 1
    loss = mean over tokens of clip(A, p / p_old), 0.2 below and 0.28 above, + 0.1 * mean over right tokens of -log p

A reward at the end fades over a long response with a fixed lambda, and a critic that learns from its own values keeps
their bias. Tokens of responses with a reward above `options.threshold`, 0 by default, are right. The authors sample
several responses per prompt, without KL, and first train the critic alone (`trainer.critic_warmup`). `critic_lam` and
`length_alpha` are options of `ppo`, too. The length of an episode is that of its trained tokens; up to 20 lambda is 0,
so short responses need a larger `length_alpha`.
"""

from functools import partial

from torch import Tensor

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.estimators.advantage import gae
from verl.algorithms.losses.policy_loss import LossInputs, SelectionInputs, TokenLoss, clipped, token_loss


def right_tokens(inputs: SelectionInputs, threshold: float = 0.0) -> Tensor:
    """[N] all tokens / right tokens on the right ones: a mean over all of what they weigh is a mean over them."""
    right_N = inputs.rewards_N > threshold
    return right_N * (len(right_N) / right_N.sum().clamp(min=1))


def clipped_with_nll(
    inputs: LossInputs, clip_low: float = 0.2, clip_high: float = 0.28, nll_weight: float = 0.1
) -> TokenLoss:
    """PPO's clip, and the negative log-likelihood of the selected tokens."""
    assert inputs.selected_T is not None
    token = clipped(inputs, clip_low, clip_high)
    loss_T = token.loss_T - nll_weight * inputs.selected_T * inputs.logprobs_T
    return token_loss(loss_T, token.ratio_T, **token.metrics_T, selected_fraction=inputs.selected_T > 0)


VAPO = Algorithm(
    name="vapo",
    paper="arXiv 2504.05118",
    advantage=partial(gae, gamma=1.0, critic_lam=1.0, length_alpha=0.05),
    policy_loss=partial(clipped_with_nll, clip_low=0.2, clip_high=0.28, nll_weight=0.1),
    selection=right_tokens,
    needs_critic=True,
    needs_group=False,
    takes_turn_rewards=True,
    learns_without_advantage=True,
)
