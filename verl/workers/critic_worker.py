"""The critic on one training rank: score a shard, update on it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.losses.ppo import clipped_value_loss
from verl.batch.packed import PackedBatch
from verl.batch.packing import Shard
from verl.batch.token_batch import Floats
from verl.workers.fsdp_engine import FSDPEngine, PackMetric, UpdateResult


@dataclass(frozen=True, slots=True)
class CriticWorker:
    """A sharded critic and its value clip range."""

    engine: FSDPEngine
    clip: float

    def score(self, shard: Shard) -> Floats:
        """[A] values of the states before the shard's trained tokens."""
        return torch.cat(self.engine.score(shard, lambda critic, packed: critic(packed))).float().numpy()

    def update(self, shard: Shard) -> UpdateResult:
        """One optimizer step on the shard's returns, values (the old ones) and loss weights."""

        def loss(critic: Any, packed: PackedBatch) -> tuple[Tensor, dict[str, PackMetric]]:
            assert packed.values is not None and packed.returns is not None and packed.loss_weights is not None
            values_A, weight_A = critic(packed), packed.loss_weights
            loss_A, clipped_A = clipped_value_loss(values_A, packed.values, packed.returns, self.clip)
            metrics_A = {"critic/clip_fraction": clipped_A, "critic/values_mean": values_A.detach()}
            means = {name: PackMetric(((each_A * weight_A).sum(),)) for name, each_A in metrics_A.items()}
            return (loss_A * weight_A).sum(), means

        return self.engine.update(shard, loss)

    def offload(self) -> None:
        self.engine.offload_all()
