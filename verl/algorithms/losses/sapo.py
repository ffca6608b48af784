"""SAPO, soft adaptive policy optimization (Qwen, arXiv 2511.20347): a smooth gate instead of the clip.

    f(ratio) = 4 / tau * sigmoid(tau * (ratio - 1)), tau = tau_pos where A > 0, else tau_neg
    loss = mean over responses of the mean over their tokens of -f(p / p_old) * A;  A as in GRPO

At ratio 1, f has slope 1, like the ratio itself, and it flattens on both sides. The authors use tau_pos = 1 and
tau_neg = 1.05: negative advantages raise many unlikely tokens, so their gradient decays faster. No KL. veRL fixes the
aggregation to the default here; TRL divides by all rows, including empty ones.
"""

from functools import partial

import torch

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.estimators.advantage import grpo
from verl.algorithms.losses.policy_loss import LossInputs, TokenLoss, log_ratios, token_loss
from verl.algorithms.names import Aggregation


def soft_gated(inputs: LossInputs, tau_pos: float = 1.0, tau_neg: float = 1.05) -> TokenLoss:
    """The ratio through a sigmoid whose temperature depends on the advantage's sign."""
    log_ratio_T = log_ratios(inputs)
    tau_T = torch.where(inputs.advantages_T > 0, tau_pos, tau_neg)
    ratio_T = log_ratio_T.exp()
    gate_T = torch.sigmoid(tau_T * (ratio_T - 1.0)) * 4.0 / tau_T
    return token_loss(-gate_T * inputs.advantages_T, ratio_T, ppo_kl=-log_ratio_T)


SAPO = Algorithm(
    name="sapo",
    paper="arXiv 2511.20347",
    advantage=grpo,
    by_group=True,
    policy_loss=partial(soft_gated, tau_pos=1.0, tau_neg=1.05),
    aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN,
)
