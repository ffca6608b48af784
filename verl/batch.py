"""The last noun before the loss: samples laid end to end in one padding-free row.

Shape legend: T packed tokens, A trained tokens of the pack (A for "action").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of packed tokens that attends to itself causally, and wholly to its prefix segment if it has one.

    Example, two responses of one prompt: Segment(0, 900), Segment(900, 1150, prefix=0), Segment(1150, 1400, prefix=0)
    """

    start: int
    end: int
    prefix: int | None = None  # index of the segment whose tokens come before this one's


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One forward's worth of tokens, and where in it the trained tokens are predicted.

    `columns` holds one value per trained token: old log-probs, advantages, loss weights, whatever the loss asks for.
    """

    token_ids: Tensor  # [T]
    position_ids: Tensor  # [T] a segment's positions go on from its prefix's
    segments: tuple[Segment, ...]
    source: Tensor  # [A] packed index of the token whose hidden state predicts the trained token
    target: Tensor  # [A] the trained token
    sample: Tensor  # [A] which sample of the mini-batch it belongs to
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
