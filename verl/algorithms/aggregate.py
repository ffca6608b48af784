"""Loss aggregation, from token losses to one scalar: every usual mode is a weight per episode.

    loss = sum over episodes e, sum over trained tokens t of e:  weight_e * loss_et

The weights are computed once per mini-batch, before it is split into packs and distributed to ranks, so the loss does
not depend on the split. An episode of several segments is one sequence, the tokens of all of them: neither its weight
nor that of others depends on how often its context was replaced. Shape legend: E episodes.
"""

import torch
from torch import Tensor

from verl.algorithms.names import Aggregation


def episode_weights(mode: Aggregation, num_tokens_E: Tensor, constant_length: float | None = None) -> Tensor:
    """[E] the weight of each trained token of each episode.

    num_tokens_E: trained tokens per episode. Episodes without any get weight 0 and are not counted as episodes.
    constant_length: the divisor of seq-mean-token-sum-norm, in tokens; needed by that mode only.
    """
    has_tokens_E = num_tokens_E > 0
    num_episodes = has_tokens_E.sum().clamp(min=1)
    num_tokens_E = num_tokens_E.clamp(min=1).to(torch.float64)
    one_E = torch.ones_like(num_tokens_E)
    if mode is Aggregation.TOKEN_MEAN:
        weights_E = one_E / num_tokens_E[has_tokens_E].sum().clamp(min=1)
    elif mode is Aggregation.TOKEN_SUM:
        weights_E = one_E
    elif mode is Aggregation.SEQ_MEAN_TOKEN_SUM:
        weights_E = one_E / num_episodes
    elif mode is Aggregation.SEQ_MEAN_TOKEN_MEAN:
        weights_E = one_E / (num_tokens_E * num_episodes)
    else:
        assert constant_length is not None and constant_length > 0
        weights_E = one_E / (constant_length * num_episodes)
    return torch.where(has_tokens_E, weights_E, 0.0)
