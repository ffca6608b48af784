"""Clip-Cov (Cui et al., arXiv 2505.22617): drops the gradient of some of the tokens that reduce entropy most.

    cov_t = (log p_t - mean of log p) * (A_t - mean of A) over all trained tokens of the mini-batch
    of the tokens with 1 < cov < 5, a random 2e-4 of all tokens lose their gradient;  A as in GRPO
    loss = mean over tokens of clip(A, p / p_old), clip 0.2

The authors use neither KL nor an entropy bonus and drop groups whose responses are all right or all wrong. They use the
log-probs of the current update and skip tokens that PPO's clip is active at, within one micro-batch on one rank. Here
log p is the policy's before the step's first update, and tokens are selected once for the whole mini-batch, however it
is split. Up to the first update both are the same. These log-probs cost one forward pass over the batch.
"""

from functools import partial

import torch
from torch import Tensor

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.estimators.advantage import grpo
from verl.algorithms.filters import zero_variance
from verl.algorithms.losses.policy_loss import LossInputs, SelectionInputs, TokenLoss, clipped, covariances, token_loss


def within_bounds(inputs: SelectionInputs, share: float = 2e-4, low: float = 1.0, high: float = 5.0) -> Tensor:
    """[N] a random subset of the tokens with low < covariance < high: `share` of all tokens, at least one."""
    covariances_N = covariances(inputs.logprobs_N, inputs.advantages_N)
    candidates = ((covariances_N > low) & (covariances_N < high)).nonzero().squeeze(-1)
    order = torch.randperm(len(candidates), generator=inputs.generator)
    chosen_N = torch.zeros(len(covariances_N), dtype=torch.bool)
    chosen_N[candidates[order[: max(1, int(share * len(covariances_N)))]]] = True
    return chosen_N


def clipped_unless_selected(inputs: LossInputs, clip_low: float = 0.2, clip_high: float = 0.2) -> TokenLoss:
    """PPO's clip; selected tokens get loss 0, but still count in the mean's denominator."""
    assert inputs.selected_T is not None
    token = clipped(inputs, clip_low, clip_high)
    loss_T = token.loss_T * (1.0 - inputs.selected_T)
    return token_loss(loss_T, token.ratio_T, **token.metrics_T, selected_fraction=inputs.selected_T)


CLIP_COV = Algorithm(
    name="clip_cov",
    paper="arXiv 2505.22617",
    advantage=grpo,
    by_group=True,
    policy_loss=partial(clipped_unless_selected, clip_low=0.2, clip_high=0.2),
    selection=partial(within_bounds, share=2e-4, low=1.0, high=5.0),
    filters=(zero_variance,),
    max_resample_rounds=10,
)
