"""What one training rank does with a policy: score packs, update on packs, hand out weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.algorithm import Algorithm, KLPlacement, OldLogprobs
from verl.algorithms.kl import KL_ESTIMATORS
from verl.algorithms.policy_loss import LossInputs
from verl.batch import PackedBatch
from verl.workers.fsdp_engine import FSDPEngine
from verl.workers.model import PackedPolicy, published_names


@dataclass(frozen=True, slots=True)
class PolicyWorker:
    """A sharded policy and the temperature its log-probs are taken at, which is the rollout's."""

    engine: FSDPEngine
    temperature: float

    def score(self, packs: Sequence[PackedBatch]) -> list[Tensor]:
        """[A] log-probs of every pack."""
        return self.engine.score(packs, lambda policy, packed: policy(packed, self.temperature, False).logprobs)

    def update(self, packs: Sequence[PackedBatch], algorithm: Algorithm) -> dict[str, float]:
        """One optimizer step on the packs' columns.

        advantages, weight, metric_weight; old_logprobs, or the policy's own of this moment where that column is
        missing; ref_logprobs if KL is in the loss; rollout_logprobs for the gap between engine and trainer.
        """

        def loss(policy: Any, packed: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
            return policy_loss(policy, packed, algorithm, self.temperature)

        return self.engine.update(packs, loss)

    def imitate(self, packs: Sequence[PackedBatch]) -> dict[str, float]:
        """One optimizer step of supervised learning: the weighted sum of -log p over the packs' trained tokens."""
        return self.engine.update(packs, imitation_loss)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor) of every weight, tied aliases included; a collective."""
        assert isinstance(self.engine.module, PackedPolicy)
        return self.engine.export_weights(published_names(self.engine.module))

    def gathered_weights(self, dtype: torch.dtype) -> list[tuple[str, Tensor]]:
        """All weights on the CPU, in `dtype`, on rank 0; the other ranks take part and return nothing.

        Aliases of one tied weight share their memory.
        """
        first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        known: dict[int, Tensor] = {}
        gathered = []
        for (name, full), (_, parameter) in zip(self.weights(), published_names(self._policy), strict=True):
            if first:
                if id(parameter) not in known:
                    known[id(parameter)] = full.detach().to("cpu", dtype, copy=True)
                gathered.append((name, known[id(parameter)]))
        return gathered

    @property
    def _policy(self) -> PackedPolicy:
        assert isinstance(self.engine.module, PackedPolicy)
        return self.engine.module


def imitation_loss(policy: Any, packed: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """The pack's share of the weighted negative log-likelihood of the trained tokens."""
    logprobs_A = policy(packed, 1.0, False).logprobs
    return -(logprobs_A * packed.columns["weight"]).sum(), {}


def policy_loss(
    policy: Any, packed: PackedBatch, algorithm: Algorithm, temperature: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The pack's share of the loss, and of the metrics' token means.

    loss = sum of weight * (policy loss + KL coefficient * KL - entropy coefficient * entropy)
    """
    output = policy(packed, temperature, True)
    column = packed.columns
    trainer_A = column["old_logprobs"] if "old_logprobs" in column else output.logprobs.detach()
    old_A = column["rollout_logprobs"] if algorithm.old_logprobs is OldLogprobs.ROLLOUT else trainer_A
    token = algorithm.policy_loss(LossInputs(output.logprobs, old_A, column["advantages"], packed.sample))
    loss_A = token.loss_T - algorithm.entropy_coefficient * output.entropy
    facts = {**token.metrics_T, "entropy": output.entropy.detach()}
    if algorithm.kl.placement is KLPlacement.LOSS:
        divergence_A = KL_ESTIMATORS[algorithm.kl.estimator](output.logprobs, column["ref_logprobs"])
        loss_A = loss_A + algorithm.kl.coefficient * divergence_A
        facts["kl"] = divergence_A.detach()
    means = {name: (fact_A * column["metric_weight"]).sum() for name, fact_A in facts.items()}
    return (loss_A * column["weight"]).sum(), {**means, **_engine_gap(column, trainer_A)}


def _engine_gap(column: Any, trainer_A: Tensor) -> dict[str, Tensor]:
    """How far the engine's log-probs are from the trainer's, on the very tokens that the engine sampled."""
    gap_A = column["rollout_logprobs"] - trainer_A
    largest = gap_A.abs().max() if len(gap_A) else gap_A.new_zeros(())
    weight_A = column["metric_weight"]
    return {
        "engine_gap_mean": (gap_A.abs() * weight_A).sum(),
        "engine_gap_max": largest,
        "engine_kl": (gap_A * weight_A).sum(),
    }
