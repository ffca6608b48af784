"""GSPO, group sequence policy optimization (Qwen, arXiv 2507.18071): one importance ratio per response.

    s = exp(mean over the response's tokens of log(p / p_old));  A = (r - mean(group)) / (std(group) + 1e-6)
    loss = mean over responses of max(-A s, -A clip(s, 1 - 3e-4, 1 + 4e-4))

Computed per token as s_t = stop(s) * p_t / stop(p_t), which has the value and the gradient of s and allows advantages
that differ within a response (GSPO-token, section 4.3). The authors run 4 updates per batch without KL. The clip range
is hundreds of times tighter than GRPO's and clips more tokens: they report an `actor/clip_fraction` of 0.15. log s is
clamped from above only, at 10, as in veRL.
"""

from functools import partial

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.estimators.advantage import grpo
from verl.algorithms.losses.policy_loss import LossInputs, TokenLoss, log_ratios, sample_means, surrogate
from verl.algorithms.names import Aggregation

_MAX_LOG_RATIO = 10.0


def sequence_clipped(inputs: LossInputs, clip_low: float = 3e-4, clip_high: float = 4e-4) -> TokenLoss:
    """PPO's clip on the geometric mean of the token ratios of each sample."""
    logprobs_T, log_ratio_T = inputs.logprobs_T, inputs.logprobs_T - inputs.old_logprobs_T
    sequence_log_ratio_T = sample_means(log_ratio_T.detach(), inputs.sample_T)
    ratio_T = (logprobs_T - logprobs_T.detach() + sequence_log_ratio_T).clamp(max=_MAX_LOG_RATIO).exp()
    return surrogate(inputs, ratio_T, clip_low, clip_high, ppo_kl=-log_ratios(inputs))


GSPO = Algorithm(
    name="gspo",
    paper="arXiv 2507.18071",
    advantage=grpo,
    by_group=True,
    policy_loss=partial(sequence_clipped, clip_low=3e-4, clip_high=4e-4),
    aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN,
)
