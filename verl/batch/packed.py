"""The input of forward pass and loss: samples concatenated into one padding-free row.

Shape legend: T packed tokens, A trained tokens of the pack (A for "action").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The tokens of one forward pass, and the positions that predict the trained tokens.

    `columns`: per-token inputs of the loss, e.g. old log-probs, advantages, loss weights.
    """

    token_ids: Tensor  # [T]
    position_ids: Tensor  # [T] a segment's positions continue those of its prefix
    segments: tuple[Segment, ...]
    source: Tensor  # [A] packed index of the token whose hidden state predicts the trained token
    target: Tensor  # [A] the trained token
    sample: Tensor  # [A] index of its sample in the mini-batch
    columns: Mapping[str, Tensor]  # each [A]

    def to(self, device: torch.device) -> PackedBatch:
        """The same pack on another device."""
        return replace(
            self,
            token_ids=self.token_ids.to(device),
            position_ids=self.position_ids.to(device),
            source=self.source.to(device),
            target=self.target.to(device),
            sample=self.sample.to(device),
            columns={name: column.to(device) for name, column in self.columns.items()},
        )
