"""The critic on one training rank: value packs, update on packs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from verl.algorithms.losses.ppo import clipped_value_loss
from verl.batch.packed import PackedBatch
from verl.workers.fsdp_engine import FSDPEngine


@dataclass(frozen=True, slots=True)
class CriticWorker:
    """A sharded critic and its value clip range."""

    engine: FSDPEngine
    clip: float

    def score(self, packs: Sequence[PackedBatch]) -> list[Tensor]:
        """[A] values of every pack, for the state before each trained token."""
        return self.engine.score(packs, lambda critic, packed: critic(packed))

    def update(self, packs: Sequence[PackedBatch]) -> dict[str, float]:
        """One optimizer step on the packs' columns: returns, values (the old ones), weight."""

        def loss(critic: Any, packed: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
            column = packed.columns
            values_A = critic(packed)
            loss_A, clipped_A = clipped_value_loss(values_A, column["values"], column["returns"], self.clip)
            weight_A = column["weight"]
            metrics_A = {"clip_fraction": clipped_A, "values_mean": values_A.detach()}
            return (loss_A * weight_A).sum(), {name: (each_A * weight_A).sum() for name, each_A in metrics_A.items()}

        return self.engine.update(packs, loss)

    def offload(self) -> None:
        """Offload after the step's updates."""
        self.engine.offload_all()
