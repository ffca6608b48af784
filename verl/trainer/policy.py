"""Policy and critic as the controller sees them: score samples, update on experience."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.aggregate import Aggregation
from verl.algorithms.algorithm import Algorithm
from verl.batch import PackedBatch
from verl.data.packing import assign, make_units, pack
from verl.single_controller.group import WorkerGroup
from verl.trainer.experience import Experience, with_weights
from verl.types import Sample
from verl.workers.critic_worker import CriticWorker
from verl.workers.policy_worker import PolicyWorker


@dataclass(frozen=True, slots=True)
class PackSettings:
    """How samples are packed."""

    max_tokens_per_pack: int = 16384
    share_prefix: bool = True


@dataclass(frozen=True)
class Learner:
    """A model sharded over a worker group."""

    workers: WorkerGroup
    packing: PackSettings

    def packs(self, minibatch: Experience) -> list[list[PackedBatch]]:
        """[rank][pack]"""
        limit, samples = self.packing.max_tokens_per_pack, minibatch.samples
        dealt = assign(make_units(samples, self.packing.share_prefix, limit), limit, self.workers.size)
        packs = [pack(units, samples, minibatch.columns) for units in dealt]
        return [packs[rank :: self.workers.size] for rank in range(self.workers.size)]

    def scored(self, function: Callable[..., Any], samples: Sequence[Sample]) -> list[Tensor]:
        """[B][L] what `function` says of the trained tokens, zero elsewhere."""
        lengths = [len(sample.token_ids) for sample in samples]
        places = torch.arange(sum(lengths)).split(lengths)
        shards = self.packs(Experience(samples, {"place": places}))
        flat = torch.zeros(sum(lengths))
        for packs, scores in zip(shards, self.workers.scatter(function, shards), strict=True):
            for packed, scores_A in zip(packs, scores, strict=True):
                flat[packed.columns["place"].long()] = scores_A.to(flat.dtype)
        return list(flat.split(lengths))


@dataclass(frozen=True)
class Policy(Learner):
    """The model that acts."""

    def score(self, samples: Sequence[Sample]) -> list[Tensor]:
        """[B][L] log-probs of the trained tokens, zero elsewhere."""
        return self.scored(PolicyWorker.score, samples)

    def update(self, minibatch: Experience, algorithm: Algorithm) -> dict[str, float]:
        """One optimizer step; the metrics are token means over the mini-batch."""
        shards = self.packs(with_weights(minibatch, algorithm.aggregation))
        metrics: dict[str, float] = self.workers.scatter(PolicyWorker.update, shards, algorithm)[0]
        return metrics

    def imitate(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One optimizer step of supervised learning: the mean of -log p over all trained tokens."""
        shards = self.packs(with_weights(Experience(samples, {}), Aggregation.TOKEN_MEAN))
        metrics: dict[str, float] = self.workers.scatter(PolicyWorker.imitate, shards)[0]
        return metrics

    def gathered_weights(self, dtype: torch.dtype) -> Any:
        """All weights by name, or a reference to them where the workers are elsewhere."""
        return self.workers.refer(PolicyWorker.gathered_weights, dtype)[0]


@dataclass(frozen=True)
class Critic(Learner):
    """The model that foresees returns."""

    def score(self, samples: Sequence[Sample]) -> list[Tensor]:
        """[B][L] values of the states before the trained tokens, zero elsewhere."""
        return self.scored(CriticWorker.score, samples)

    def update(self, minibatch: Experience) -> dict[str, float]:
        """One optimizer step on all trained tokens alike; the metrics are token means over the mini-batch."""
        shards = self.packs(with_weights(minibatch, Aggregation.TOKEN_MEAN))
        metrics: dict[str, float] = self.workers.scatter(CriticWorker.update, shards)[0]
        return metrics
