"""Log-probs and entropy of trained tokens from their hidden states, in chunks, never a full [T, V] tensor.

Shape legend: A trained tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_CHUNK = 1024


def token_logprobs(
    hidden_AE: Tensor, head_VE: Tensor, target_A: Tensor, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """([A] log p(target), [A] entropy or None) of softmax(hidden @ head^T / temperature), in float32 or better.

    Logits exist for one chunk at a time; the backward computes each chunk's again.
    """
    pieces = [
        cast(
            tuple[Tensor, Tensor | None],
            checkpoint(_of_chunk, hidden, head_VE, target, temperature, with_entropy, use_reentrant=False),
        )
        for hidden, target in zip(hidden_AE.split(_CHUNK), target_A.split(_CHUNK), strict=True)
    ]
    logprobs_A = torch.cat([logprobs for logprobs, _ in pieces]) if pieces else hidden_AE.sum(-1)
    if not with_entropy:
        return logprobs_A, None
    return logprobs_A, torch.cat([entropy for _, entropy in pieces if entropy is not None])


def _of_chunk(
    hidden_AE: Tensor, head_VE: Tensor, target_A: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    logits_AV = hidden_AE @ head_VE.T
    logits_AV = logits_AV.to(torch.promote_types(logits_AV.dtype, torch.float32)) / temperature
    all_AV = logits_AV.log_softmax(-1)
    logprobs_A = all_AV.gather(-1, target_A[:, None]).squeeze(-1)
    return logprobs_A, -(all_AV.exp() * all_AV).sum(-1) if with_entropy else None
