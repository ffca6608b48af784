"""CISPO, clipped importance sampling weights (MiniMax-M1, arXiv 2506.13585): clips the weight, never the gradient.

    A = (r - mean(group)) / (std(group) + 1e-6)
    loss = mean over tokens of -stop(clip(p / p_old, 1 - low, 1 + high)) * A * log p

Every token keeps its gradient, in particular the rare ones that start a reflection. The authors use no lower bound
(low = 1) and do not report the upper one; 4 (a weight of at most 5) is ScaleRL's (arXiv 2510.13786). They use DAPO's
dynamic sampling and no KL. TRL's `epsilon_high` is the bound itself, not its distance from 1.
"""

from functools import partial

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.estimators.advantage import grpo
from verl.algorithms.filters import zero_variance
from verl.algorithms.losses.policy_loss import LossInputs, TokenLoss, log_ratios, token_loss


def weight_clipped(inputs: LossInputs, clip_low: float = 1.0, clip_high: float = 4.0) -> TokenLoss:
    """REINFORCE weighted by the clipped importance ratio, which carries no gradient."""
    log_ratio_T = log_ratios(inputs)
    ratio_T = log_ratio_T.detach().exp()
    weight_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_T = -weight_T * inputs.advantages_T * inputs.logprobs_T
    return token_loss(loss_T, ratio_T, clip_fraction=ratio_T != weight_T, ppo_kl=-log_ratio_T)


CISPO = Algorithm(
    name="cispo",
    paper="arXiv 2506.13585",
    advantage=grpo,
    by_group=True,
    policy_loss=partial(weight_clipped, clip_low=1.0, clip_high=4.0),
    filters=(zero_variance,),
    max_resample_rounds=10,
)
