"""GSPO, group sequence policy optimisation (Qwen, arXiv 2507.18071): the ratio is that of the whole response.

    s = exp(mean over the response's tokens of log(p / p_old));  A = (r - mean(group)) / (std(group) + 1e-6)
    loss = mean over responses of max(-A s, -A clip(s, 1 - 3e-4, 1 + 4e-4))

Written token by token as s_t = stop(s) * p_t / stop(p_t), which has the value and the gradient of s and leaves room
for advantages that differ within a response (GSPO-token, section 4.3). Its authors run 4 updates per batch and leave KL
out. The clip is hundreds of times tighter than GRPO's, and cuts more tokens: an `actor/clip_fraction` of 0.15 is what
they report. veRL holds log s within 10 from above alone, as here.
"""

from functools import partial

from verl.algorithms.advantage import grpo
from verl.algorithms.aggregate import Aggregation
from verl.algorithms.algorithm import Algorithm
from verl.algorithms.policy_loss import LossInputs, TokenLoss, log_ratios, sample_means, surrogate

_MAX_LOG_RATIO = 10.0


def sequence_clipped(inputs: LossInputs, clip_low: float = 3e-4, clip_high: float = 4e-4) -> TokenLoss:
    """PPO's clip on the geometric mean of the token ratios of each sample."""
    logprobs_T, log_ratio_T = inputs.logprobs_T, inputs.logprobs_T - inputs.old_logprobs_T
    of_sample_T = sample_means(log_ratio_T.detach(), inputs.sample_T)
    ratio_T = (logprobs_T - logprobs_T.detach() + of_sample_T).clamp(max=_MAX_LOG_RATIO).exp()
    return surrogate(inputs, ratio_T, clip_low, clip_high, ppo_kl=-log_ratios(inputs))


GSPO = Algorithm(
    name="gspo",
    paper="arXiv 2507.18071",
    advantage=grpo,
    policy_loss=partial(sequence_clipped, clip_low=3e-4, clip_high=4e-4),
    aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN,
)
