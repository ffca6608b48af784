"""What one training rank does for the controller: score packs, update on packs, hand out weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from verl.algorithms.algorithm import Algorithm, KLPlacement
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
        """One optimizer step on the packs' columns: old_logprobs, advantages, weight, metric_weight, ref_logprobs."""

        def loss(policy: Any, packed: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
            return policy_loss(policy, packed, algorithm, self.temperature)

        return self.engine.update(packs, loss)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor) of every weight, tied aliases included; a collective."""
        assert isinstance(self.engine.module, PackedPolicy)
        return self.engine.export_weights(published_names(self.engine.module))


def policy_loss(
    policy: Any, packed: PackedBatch, algorithm: Algorithm, temperature: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The pack's share of the loss, and of the metrics' token means.

    loss = sum of weight * (policy loss + KL coefficient * KL - entropy coefficient * entropy)
    """
    output = policy(packed, temperature, True)
    column = packed.columns
    token = algorithm.policy_loss(
        LossInputs(output.logprobs, column["old_logprobs"], column["advantages"], packed.sample)
    )
    loss_A = token.loss_T - algorithm.entropy_coefficient * output.entropy
    facts = {**token.metrics_T, "entropy": output.entropy.detach()}
    if algorithm.kl.placement is KLPlacement.LOSS:
        divergence_A = KL_ESTIMATORS[algorithm.kl.estimator](output.logprobs, column["ref_logprobs"])
        loss_A = loss_A + algorithm.kl.coefficient * divergence_A
        facts["kl"] = divergence_A.detach()
    means = {name: (fact_A * column["metric_weight"]).sum() for name, fact_A in facts.items()}
    return (loss_A * column["weight"]).sum(), means
