"""IPO, INTELLECT policy optimization (prime-rl), with the KL penalty of Kimi K2.5 (arXiv 2602.02276).

    kept: |p - p_old| <= 0.1;  A = r - mean(group)
    loss = mean over tokens of [-A * p / p_old on kept tokens, 0 on the others, + 1e-3 * log(p / p_old)^2 on all]

The trust region is that of `dppo_tv`, but in both directions: tokens that move back from afar are dropped, too. p_old
is the policy that has sampled, with the engine's log-probs, so the penalty pulls toward it. It also acts on samples
without an advantage. Both numbers are defaults of prime-rl, whose later versions have 0.3.
"""

from functools import partial

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.estimators.dr_grpo import group_centered
from verl.algorithms.losses.policy_loss import LossInputs, TokenLoss, log_ratios, token_loss
from verl.algorithms.names import OldLogprobs


def penalized_within_bounds(inputs: LossInputs, bound: float = 0.1, tau: float = 1e-3) -> TokenLoss:
    """bound: of the change of the probability; tau: coefficient of the squared log ratio"""
    log_ratio_T = log_ratios(inputs)
    ratio_T = log_ratio_T.exp()
    kept_T = (inputs.logprobs_T.exp() - inputs.old_logprobs_T.exp()).detach().abs() <= bound
    loss_T = -inputs.advantages_T * ratio_T * kept_T + tau * log_ratio_T.square()
    return token_loss(loss_T, ratio_T, clip_fraction=~kept_T, ppo_kl=-log_ratio_T)


IPO = Algorithm(
    name="ipo",
    paper="prime-rl",
    advantage=group_centered,
    by_group=True,
    policy_loss=partial(penalized_within_bounds, bound=0.1, tau=1e-3),
    old_logprobs=OldLogprobs.ROLLOUT,
    learns_without_advantage=True,
)
