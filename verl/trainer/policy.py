"""Policy and critic on the controller's side: score batches, update on batches."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.names import Aggregation
from verl.batch.experience import with_loss_weights
from verl.batch.packing import Sharding, assign, make_units
from verl.batch.token_batch import Floats, TokenBatch
from verl.batch.trace import Trace, joined_ranks, joined_updates
from verl.single_controller.group import WorkerGroup
from verl.tracking.metric import Metric
from verl.transfer.bucket import BucketLayout, OpenSender
from verl.transfer.stream import Address
from verl.workers.critic_worker import CriticWorker
from verl.workers.fsdp_engine import UpdateResult
from verl.workers.policy_worker import PolicyWorker


@dataclass(frozen=True, slots=True)
class PackSettings:
    max_tokens_per_pack: int = 16384
    share_prefix: bool = True


@dataclass(frozen=True)
class ShardedModel:
    """A model sharded over a worker group."""

    workers: WorkerGroup
    packing: PackSettings
    worker: ClassVar[type[PolicyWorker | CriticWorker]]  # of the group

    def shard(self, batch: TokenBatch) -> Sharding:
        """Assign samples to ranks and packs: balanced token counts, samples with one prefix together."""
        limit = self.packing.max_tokens_per_pack
        units = make_units(batch, self.packing.share_prefix, limit)
        return Sharding(batch, assign(units, limit, self.workers.size), self.workers.size)

    def shard_for_scoring(self, batch: TokenBatch) -> Sharding:
        """The tokens of a batch and what is trained of them, sharded once for all models that score it."""
        names = ["token_ids", "action_mask", "num_tokens", "num_trained", "groups", "episodes", "hint_ids", "num_hints"]
        return self.shard(TokenBatch(**{name: getattr(batch, name) for name in names}))

    def score(self, sharding: Sharding) -> Floats:
        """[A] the policy's log-probs of the trained tokens, or the critic's values of the states before them."""
        return sharding.gathered(self.workers.scatter(self.worker.score, sharding.shards()))


class PolicyUpdate(NamedTuple):
    metrics: dict[str, Metric]
    logprobs: Floats | None  # [A] before the update, if it estimated the advantages by them


@dataclass(frozen=True)
class Policy(ShardedModel):
    """The model that generates responses."""

    worker = PolicyWorker

    def top(self, sharding: Sharding, k: int) -> npt.NDArray[np.void]:
        """[A] as a teacher: its k likeliest tokens in place of the trained ones, and their log-probs (`top_type`)."""
        return sharding.gathered_top(self.workers.scatter(PolicyWorker.top, sharding.shards(), k))

    def entropies(self, batch: TokenBatch) -> Floats:
        """[A] the policy's entropies at the trained tokens."""
        sharding = self.shard_for_scoring(batch)
        return sharding.gathered(self.workers.scatter(PolicyWorker.entropies, sharding.shards()))

    def update(self, computed: TokenBatch, algorithm: Algorithm, compare_engine: bool = True) -> PolicyUpdate:
        """One optimizer step on what `policy_minibatch` returns.

        The metrics are token means over the samples; without any, only loss, grad_norm and lr.
        compare_engine: see `PolicyWorker.update`
        """
        sharding = self.shard(computed)
        shards = sharding.shards()
        results: list[UpdateResult] = self.workers.scatter(PolicyWorker.update, shards, algorithm, compare_engine)
        result = results[0] if len(computed) else replace(results[0], metrics={})
        logprobs = [each.logprobs for each in results if each.logprobs is not None]
        return PolicyUpdate(result.of("actor"), sharding.gathered(logprobs) if logprobs else None)

    def start_trace(self, samples: Container[int]) -> None:
        """Trace the following updates. samples: those whose tokens are traced, by `TokenBatch.numbers`"""
        self.workers.call(PolicyWorker.start_trace, samples)

    def end_trace(self) -> Trace:
        """The trace of the updates since `start_trace`."""
        by_rank = self.workers.call(PolicyWorker.end_trace)
        return joined_updates([joined_ranks(each) for each in zip(*by_rank, strict=True)])

    def can_estimate(self, minibatch: TokenBatch) -> bool:
        """Whether an update on the mini-batch can estimate advantages by group: each is in one pack."""
        return self.shard(minibatch).keeps_groups()

    def sft_step(self, batch: TokenBatch, weights: Floats | None = None) -> dict[str, Metric]:
        """One optimizer step of supervised fine-tuning: the mean of -log p over all trained tokens.

        weights: [B] those of each sample's tokens in a sum of -log p, in place of the mean
        """
        mean = weights is None
        weighted = with_loss_weights(batch, Aggregation.TOKEN_MEAN) if mean else replace(batch, loss_weights=weights)
        shards = self.shard(weighted).shards()
        result: UpdateResult = self.workers.scatter(PolicyWorker.sft_step, shards)[0]
        return result.of("actor")

    def connect(self, senders: Sequence[OpenSender], dtype: torch.dtype, bucket_bytes: int) -> list[BucketLayout]:
        """Prepare weight sync; returns its buckets. senders: by rank"""
        layouts: list[BucketLayout] = self.workers.scatter(PolicyWorker.connect, senders, dtype, bucket_bytes)[0]
        return layouts

    def begin_weight_sync(self) -> dict[int, Address]:
        """Offload the optimizer state: updates are over and the engines need the memory.

        Returns where engines connect, by the rank that sends.
        """
        addresses: list[Address | None] = self.workers.call(PolicyWorker.begin_weight_sync)
        return {rank: each for rank, each in enumerate(addresses) if each is not None}

    def send_weights(self, keys: Mapping[int, Collection[bytes]], version: int) -> None:
        """Send all buckets to the engines, and wait until they are loaded. keys: of the connected engines, by rank"""
        by_rank = [keys.get(rank, ()) for rank in range(self.workers.size)]
        self.workers.scatter(PolicyWorker.send_weights, by_rank, version)

    def end_weight_sync(self) -> float | None:
        """All engines have all weights: offload the policy until it is used again.

        Returns the share of an adapter's update that merged weights kept; None if none was merged.
        """
        shares: list[float | None] = self.workers.call(PolicyWorker.end_weight_sync)
        return next((each for each in shares if each is not None), None)


@dataclass(frozen=True)
class Critic(ShardedModel):
    """The model that predicts returns."""

    worker = CriticWorker

    def update(self, minibatch: TokenBatch) -> dict[str, Metric]:
        """One optimizer step, all trained tokens weighted equally; the metrics are token means over the mini-batch."""
        shards = self.shard(with_loss_weights(minibatch, Aggregation.TOKEN_MEAN)).shards()
        result: UpdateResult = self.workers.scatter(CriticWorker.update, shards)[0]
        return result.of("critic")

    def offload(self) -> None:
        """Called when the step's updates are over."""
        self.workers.call(CriticWorker.offload)
