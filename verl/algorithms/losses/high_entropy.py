"""Policy gradients of high-entropy tokens alone (Qwen, arXiv 2506.01939), in DAPO.

    chosen: the 20 % of the mini-batch's trained tokens with the highest entropy of the policy
    loss = mean over all tokens of clip(A, p / p_old), 0.2 below and 0.28 above, on chosen tokens, 0 on the others

Most tokens follow from what was written; a few decide where the response goes, and there the policy is undecided. The
authors find that they carry the gain, in larger models more than it. The others still count in the mean. The entropies
are those before each update, of a forward pass over the mini-batch. TRL chooses within a rank's micro-batch.
"""

from dataclasses import replace
from functools import partial

import numpy as np
from torch import Tensor

from verl.algorithms.losses.dapo import DAPO
from verl.algorithms.losses.policy_loss import LossInputs, SelectionInputs, TokenLoss, clipped, token_loss


def highest_entropy(inputs: SelectionInputs, share: float = 0.2) -> Tensor:
    """[N] the tokens at or above the quantile 1 - share of the entropies, interpolated as in TRL."""
    entropies_N = inputs.entropies()
    return entropies_N >= float(np.quantile(entropies_N.numpy(), 1.0 - share))


def clipped_where_selected(inputs: LossInputs, clip_low: float = 0.2, clip_high: float = 0.2) -> TokenLoss:
    """PPO's clip; the other tokens get loss 0, but still count in the mean's denominator."""
    assert inputs.selected_T is not None
    token = clipped(inputs, clip_low, clip_high)
    return token_loss(
        token.loss_T * inputs.selected_T, token.ratio_T, **token.metrics_T, selected_fraction=inputs.selected_T
    )


HIGH_ENTROPY = replace(
    DAPO,
    name="high_entropy",
    paper="arXiv 2506.01939",
    policy_loss=partial(clipped_where_selected, clip_low=0.2, clip_high=0.28),
    selection=partial(highest_entropy, share=0.2),
)
