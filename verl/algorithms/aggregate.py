"""Loss aggregation, from token losses to one scalar: every usual mode is a weight per sample.

    loss = sum over samples b, sum over trained tokens t of b:  weight_b * loss_bt

The weights are computed once per mini-batch, before it is split into packs and distributed to ranks, so the loss does
not depend on the split. Shape legend: B samples.
"""

import torch
from torch import Tensor

from verl.algorithms.names import Aggregation


def sample_weights(mode: Aggregation, num_tokens_B: Tensor, constant_length: float | None = None) -> Tensor:
    """[B] the weight of each trained token of each sample.

    num_tokens_B: trained tokens per sample. Samples without any get weight 0 and are not counted as samples.
    constant_length: the divisor of seq-mean-token-sum-norm, in tokens; needed by that mode only.
    """
    has_tokens_B = num_tokens_B > 0
    num_samples = has_tokens_B.sum().clamp(min=1)
    num_tokens_B = num_tokens_B.clamp(min=1).to(torch.float64)
    one_B = torch.ones_like(num_tokens_B)
    if mode is Aggregation.TOKEN_MEAN:
        weights_B = one_B / num_tokens_B[has_tokens_B].sum().clamp(min=1)
    elif mode is Aggregation.TOKEN_SUM:
        weights_B = one_B
    elif mode is Aggregation.SEQ_MEAN_TOKEN_SUM:
        weights_B = one_B / num_samples
    elif mode is Aggregation.SEQ_MEAN_TOKEN_MEAN:
        weights_B = one_B / (num_tokens_B * num_samples)
    else:
        assert constant_length is not None and constant_length > 0
        weights_B = one_B / (constant_length * num_samples)
    return torch.where(has_tokens_B, weights_B, 0.0)
