"""Policy and critic on the controller's side: score samples, update on experience."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.names import Aggregation
from verl.batch.experience import Experience, drop_zero_advantage, with_metric_weights, with_weights
from verl.batch.packed import PackedBatch
from verl.batch.packing import assign, make_units, pack
from verl.single_controller.group import WorkerGroup
from verl.transfer.bucket import BucketLayout, OpenSender
from verl.types import Sample
from verl.workers.critic_worker import CriticWorker
from verl.workers.policy_worker import PolicyWorker


@dataclass(frozen=True, slots=True)
class PackSettings:
    """How samples are packed."""

    max_tokens_per_pack: int = 16384
    share_prefix: bool = True


@dataclass(frozen=True, slots=True)
class ScoringBatch:
    """Samples in packs; the column "place" holds the index of each trained token among all tokens."""

    shards: list[list[PackedBatch]]  # [rank][pack]
    lengths: tuple[int, ...]  # [B] tokens of each sample

    def unpacked(self, scores: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """[rank][pack][A] -> [B][L], zero where nothing is trained."""
        flat = torch.zeros(sum(self.lengths))
        for packs, of_rank in zip(self.shards, scores, strict=True):
            for packed, scores_A in zip(packs, of_rank, strict=True):
                flat[packed.columns["place"].long()] = scores_A.to(flat.dtype)
        return list(flat.split(list(self.lengths)))


@dataclass(frozen=True)
class ShardedModel:
    """A model sharded over a worker group."""

    workers: WorkerGroup
    packing: PackSettings

    def packs(self, minibatch: Experience) -> list[list[PackedBatch]]:
        """[rank][pack]"""
        limit, samples = self.packing.max_tokens_per_pack, minibatch.samples
        dealt = assign(make_units(samples, self.packing.share_prefix, limit), limit, self.workers.size)
        packs = [pack(units, samples, minibatch.columns) for units in dealt]
        return [packs[rank :: self.workers.size] for rank in range(self.workers.size)]

    def pack_for_scoring(self, samples: Sequence[Sample]) -> ScoringBatch:
        """The samples packed once, for all models that score them."""
        lengths = tuple(len(sample.token_ids) for sample in samples)
        places = torch.arange(sum(lengths)).split(lengths)
        return ScoringBatch(self.packs(Experience(samples, {"place": places})), lengths)

    def scored(self, function: Callable[..., Any], layout: ScoringBatch) -> list[Tensor]:
        """[B][L] the values of `function` at the trained tokens, zero elsewhere."""
        return layout.unpacked(self.workers.scatter(function, layout.shards))


@dataclass(frozen=True)
class Policy(ShardedModel):
    """The model that generates responses."""

    def score(self, layout: ScoringBatch) -> list[Tensor]:
        """[B][L] log-probs of the trained tokens, zero elsewhere."""
        return self.scored(PolicyWorker.score, layout)

    def update(self, minibatch: Experience, algorithm: Algorithm) -> dict[str, float]:
        """One optimizer step. Samples with zero advantage count in the loss's denominators, but are not computed.

        The metrics are token means over the computed samples; without any, only loss, grad_norm and lr.
        """
        weighted = with_weights(minibatch, algorithm.aggregation, algorithm.aggregation_length)
        computed = with_metric_weights(drop_zero_advantage(weighted, algorithm))
        shards = self.packs(computed)
        metrics: dict[str, float] = self.workers.scatter(PolicyWorker.update, shards, algorithm)[0]
        if not computed.samples:
            metrics = {name: metrics[name] for name in ("loss", "grad_norm", "lr")}
        return {**metrics, "computed_share": len(computed.samples) / len(minibatch.samples)}

    def sft_step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One optimizer step of supervised fine-tuning: the mean of -log p over all trained tokens."""
        shards = self.packs(with_weights(Experience(samples, {}), Aggregation.TOKEN_MEAN))
        metrics: dict[str, float] = self.workers.scatter(PolicyWorker.sft_step, shards)[0]
        return metrics

    def connect(self, senders: Sequence[OpenSender], dtype: torch.dtype, bucket_bytes: int) -> list[BucketLayout]:
        """Prepare weight sync; returns its buckets. senders: by rank"""
        layouts: list[BucketLayout] = self.workers.scatter(PolicyWorker.connect, senders, dtype, bucket_bytes)[0]
        return layouts

    def send_bucket(self, number: int) -> list[Any]:
        """Every rank's handle of a bucket, or a reference to it where the workers are remote."""
        return self.workers.call_ref(PolicyWorker.send_bucket, number)

    def begin_weight_sync(self) -> None:
        """Offload the optimizer state: updates are over and the engines need the memory."""
        self.workers.call(PolicyWorker.begin_weight_sync)

    def end_weight_sync(self) -> None:
        """All engines have all weights: offload the policy until it is used again."""
        self.workers.call(PolicyWorker.end_weight_sync)


@dataclass(frozen=True)
class Critic(ShardedModel):
    """The model that predicts returns."""

    def score(self, layout: ScoringBatch) -> list[Tensor]:
        """[B][L] values of the states before the trained tokens, zero elsewhere."""
        return self.scored(CriticWorker.score, layout)

    def update(self, minibatch: Experience) -> dict[str, float]:
        """One optimizer step, all trained tokens weighted equally; the metrics are token means over the mini-batch."""
        shards = self.packs(with_weights(minibatch, Aggregation.TOKEN_MEAN))
        metrics: dict[str, float] = self.workers.scatter(CriticWorker.update, shards)[0]
        return metrics

    def offload(self) -> None:
        """Called when the step's updates are over."""
        self.workers.call(CriticWorker.offload)
