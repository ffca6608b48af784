"""KL-Cov (Cui et al., arXiv 2505.22617): a KL penalty on the tokens that reduce entropy most.

    cov_t as in Clip-Cov; selected: the 2e-3 of all tokens with the largest cov_t
    loss = mean over tokens of -A * p / p_old, plus beta * |log(p / p_old)| on the selected ones;  A as in GRPO

Nothing is clipped. The authors use 2e-3 of the tokens for 7B and 2e-4 for 32B, beta = 1, no KL to a reference, no
entropy bonus, and drop groups whose responses are all right or all wrong; veRL's default is 2e-4. Tokens are selected
once for the whole mini-batch, from log-probs before the step's first update (see Clip-Cov). With one update per batch
|log(p / p_old)| is 0 and has no gradient, so KL-Cov needs several.
"""

from functools import partial

import torch
from torch import Tensor

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.estimators.advantage import grpo
from verl.algorithms.filters import zero_variance
from verl.algorithms.losses.policy_loss import (
    LossInputs,
    SelectionInputs,
    TokenLoss,
    covariances,
    log_ratios,
    token_loss,
)


def largest(inputs: SelectionInputs, share: float = 2e-3) -> Tensor:
    """[N] the `share` of all tokens with the largest covariances, at least one. Deterministic."""
    covariances_N = covariances(inputs.logprobs_N, inputs.advantages_N)
    chosen_N = torch.zeros(len(covariances_N), dtype=torch.bool)
    count = min(len(chosen_N), max(1, int(share * len(chosen_N))))
    chosen_N[covariances_N.topk(count).indices] = True
    return chosen_N


def penalty_where_selected(inputs: LossInputs, beta: float = 1.0) -> TokenLoss:
    """The unclipped surrogate, plus beta * |log ratio| on the selected tokens."""
    assert inputs.selected_T is not None
    log_ratio_T = log_ratios(inputs)
    ratio_T = log_ratio_T.exp()
    loss_T = -inputs.advantages_T * ratio_T + beta * inputs.selected_T * log_ratio_T.abs()
    return token_loss(loss_T, ratio_T, ppo_kl=-log_ratio_T, selected_fraction=inputs.selected_T)


KL_COV = Algorithm(
    name="kl_cov",
    paper="arXiv 2505.22617",
    advantage=grpo,
    by_group=True,
    policy_loss=partial(penalty_where_selected, beta=1.0),
    selection=partial(largest, share=2e-3),
    filters=(zero_variance,),
    max_resample_rounds=10,
)
