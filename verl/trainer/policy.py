"""The policy as the controller sees it: score samples, update on experience, hand weights over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.algorithms.algorithm import Algorithm
from verl.batch import PackedBatch
from verl.data.packing import assign, make_units, pack
from verl.single_controller.group import WorkerGroup
from verl.trainer.experience import Experience, with_weights
from verl.types import Sample
from verl.workers.policy_worker import PolicyWorker


@dataclass(frozen=True, slots=True)
class PackSettings:
    """How samples are packed."""

    max_tokens_per_pack: int = 16384
    share_prefix: bool = True


@dataclass(frozen=True)
class Policy:
    """A policy sharded over a worker group."""

    workers: WorkerGroup
    packing: PackSettings

    def _packs(self, minibatch: Experience) -> list[list[PackedBatch]]:
        """[rank][pack]"""
        limit, samples = self.packing.max_tokens_per_pack, minibatch.samples
        dealt = assign(make_units(samples, self.packing.share_prefix, limit), limit, self.workers.size)
        packs = [pack(units, samples, minibatch.columns) for units in dealt]
        return [packs[rank :: self.workers.size] for rank in range(self.workers.size)]

    def score(self, samples: Sequence[Sample]) -> list[Tensor]:
        """[B][L] log-probs of the trained tokens, zero elsewhere."""
        rows = [torch.zeros(len(sample.token_ids)) for sample in samples]
        places = [torch.arange(len(sample.token_ids)) for sample in samples]
        shards = self._packs(Experience(samples, {"place": places}))
        for packs, scored in zip(shards, self.workers.scatter(PolicyWorker.score, shards), strict=True):
            for packed, logprobs_A in zip(packs, scored, strict=True):
                for row, place, logprob in zip(packed.sample, packed.columns["place"], logprobs_A, strict=True):
                    rows[row][place] = logprob
        return rows

    def update(self, minibatch: Experience, algorithm: Algorithm) -> dict[str, float]:
        """One optimizer step; the metrics are token means over the mini-batch."""
        shards = self._packs(with_weights(minibatch, algorithm.aggregation))
        metrics: dict[str, float] = self.workers.scatter(PolicyWorker.update, shards, algorithm)[0]
        return metrics

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full weights by name."""
        weights: Iterator[tuple[str, Tensor]] = self.workers.call(PolicyWorker.weights)[0]
        return weights
