"""A pack: what a rank computes in one forward pass.

Shape legend: A trained tokens of the pack ("A" for action), C context tokens whose log-probs are in the loss, T packed
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """A range of packed tokens that attends causally to itself, and fully to its prefix segment if it has one.

    Example, two responses of one prompt: Segment(0, 900), Segment(900, 1150, prefix=0), Segment(1150, 1400, prefix=0)
    """

    start: int
    end: int
    prefix: int | None = None  # index of the prefix segment


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """The input of one forward pass: samples concatenated into one padding-free row, and the positions that predict the
    trained tokens. From `advantages` on: the fields of the `TokenBatch` at the pack's trained tokens. Where the batch
    has `nll_weights`, the positions that predict other tokens with a weight follow.
    """

    token_ids: Tensor  # [T]
    position_ids: Tensor  # [T] a segment's positions continue those of its prefix
    segments: tuple[Segment, ...]
    source: Tensor  # [A + C] packed index of the token whose hidden state predicts the trained token, or the context's
    target: Tensor  # [A + C] the trained token, or the context's
    sample: Tensor  # [A] row of its sample in the batch
    advantages: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    top_ids: Tensor | None = None  # [A, K] those of `teacher_top`
    top_logprobs: Tensor | None = None  # [A, K] the teacher's
    values: Tensor | None = None
    returns: Tensor | None = None
    selected: Tensor | None = None  # 0 where not selected, else 1 or a weight
    loss_weights: Tensor | None = None
    nll_weights: Tensor | None = None  # [A + C]
    metric_weight: float = 0.0
    sampled_weight: float = 0.0

    def to(self, device: torch.device) -> PackedBatch:
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        there: dict[str, Any] = {
            name: moved(each, device) for name, each in columns.items() if isinstance(each, Tensor)
        }
        return replace(self, **there)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """To a GPU through pinned memory: the host goes on while earlier packs are computed and this tensor is copied."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
