"""Policy and critic on the controller's side: score batches, update on batches."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.names import Aggregation
from verl.batch.experience import drop_zero_advantage, with_loss_weights, with_metric_weights
from verl.batch.packing import Sharding, assign, make_units
from verl.batch.token_batch import Floats, TokenBatch
from verl.batch.trace import Trace, joined_ranks
from verl.single_controller.group import WorkerGroup
from verl.tracking.metric import Mean, Metric
from verl.transfer.bucket import BucketLayout, OpenSender
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

    def shard(self, batch: TokenBatch) -> Sharding:
        """Assign samples to ranks and packs: balanced token counts, samples with one prefix together."""
        limit = self.packing.max_tokens_per_pack
        units = make_units(batch, self.packing.share_prefix, limit)
        return Sharding(batch, assign(units, limit, self.workers.size), self.workers.size)

    def shard_for_scoring(self, batch: TokenBatch) -> Sharding:
        """The tokens of a batch, sharded once for all models that score it."""
        return self.shard(batch.tokens_alone())

    def scored(self, function: Callable[..., Any], sharding: Sharding) -> Floats:
        """[A] the values of `function` at the trained tokens."""
        return sharding.gathered(self.workers.scatter(function, sharding.shards()))


@dataclass(frozen=True)
class Policy(ShardedModel):
    """The model that generates responses."""

    def score(self, sharding: Sharding) -> Floats:
        """[A] log-probs of the trained tokens."""
        return self.scored(PolicyWorker.score, sharding)

    def update(self, minibatch: TokenBatch, algorithm: Algorithm, compare_engine: bool = True) -> dict[str, Metric]:
        """The metrics of `traced_update`, without a trace."""
        return self.traced_update(minibatch, algorithm, compare_engine, None)[0]

    def traced_update(
        self, minibatch: TokenBatch, algorithm: Algorithm, compare_engine: bool, traced: Container[int] | None
    ) -> tuple[dict[str, Metric], Trace, Floats | None]:
        """One optimizer step: its metrics, its trace, and the log-probs [A] before it where advantages were pending.

        Samples with zero advantage count in the loss's denominators, but are not computed.

        The metrics are token means over the computed samples; without any, only loss, grad_norm and lr.
        compare_engine, traced: see `PolicyWorker.update`
        """
        weighted = with_loss_weights(minibatch, algorithm.aggregation, algorithm.aggregation_length)
        computed = with_metric_weights(drop_zero_advantage(weighted, algorithm))
        sharding = self.shard(computed)
        results: list[UpdateResult] = self.workers.scatter(
            PolicyWorker.update, sharding.shards(), algorithm, compare_engine, traced
        )
        result = results[0] if len(computed) else replace(results[0], metrics={})
        metrics = {**result.of("actor"), "actor/computed_share": Mean(len(computed) / len(minibatch))}
        trace = joined_ranks(each.trace for each in results if each.trace is not None)
        logprobs = [each.logprobs for each in results if each.logprobs is not None]
        return metrics, trace, sharding.gathered(logprobs) if computed.advantages_pending else None

    def can_estimate(self, minibatch: TokenBatch) -> bool:
        """Whether an update on the mini-batch can estimate advantages by group: each is in one pack."""
        return self.shard(minibatch).keeps_groups()

    def sft_step(self, batch: TokenBatch) -> dict[str, Metric]:
        """One optimizer step of supervised fine-tuning: the mean of -log p over all trained tokens."""
        shards = self.shard(with_loss_weights(batch, Aggregation.TOKEN_MEAN)).shards()
        result: UpdateResult = self.workers.scatter(PolicyWorker.sft_step, shards)[0]
        return result.of("actor")

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

    def score(self, sharding: Sharding) -> Floats:
        """[A] values of the states before the trained tokens."""
        return self.scored(CriticWorker.score, sharding)

    def update(self, minibatch: TokenBatch) -> dict[str, Metric]:
        """One optimizer step, all trained tokens weighted equally; the metrics are token means over the mini-batch."""
        shards = self.shard(with_loss_weights(minibatch, Aggregation.TOKEN_MEAN)).shards()
        result: UpdateResult = self.workers.scatter(CriticWorker.update, shards)[0]
        return result.of("critic")

    def offload(self) -> None:
        """Called when the step's updates are over."""
        self.workers.call(CriticWorker.offload)
