"""What one training rank does with a critic: value packs, update on packs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from verl.algorithms.value_loss import clipped_value_loss
from verl.batch import PackedBatch
from verl.workers.fsdp_engine import FSDPEngine


@dataclass(frozen=True, slots=True)
class CriticWorker:
    """A sharded critic, and how far one update may move a value."""

    engine: FSDPEngine
    clip: float

    def score(self, packs: Sequence[PackedBatch]) -> list[Tensor]:
        """[A] values of every pack: of the state before each trained token."""
        return self.engine.score(packs, lambda critic, packed: critic(packed))

    def update(self, packs: Sequence[PackedBatch]) -> dict[str, float]:
        """One optimizer step on the packs' columns: returns, values (the old ones), weight."""

        def loss(critic: Any, packed: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
            column = packed.columns
            values_A = critic(packed)
            loss_A, clipped_A = clipped_value_loss(values_A, column["values"], column["returns"], self.clip)
            weight_A = column["weight"]
            facts = {"clip_fraction": (clipped_A * weight_A).sum(), "values_mean": (values_A * weight_A).sum().detach()}
            return (loss_A * weight_A).sum(), facts

        return self.engine.update(packs, loss)

    def offload(self) -> None:
        """The step's updates are over; the next that is asked is a score."""
        self.engine.offload_all()
