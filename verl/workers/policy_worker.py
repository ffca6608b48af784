"""What one training rank does with a policy: score packs, update on packs, hand out weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from verl.algorithms.algorithm import Algorithm, KLPlacement, OldLogprobs
from verl.algorithms.correction import UNBOUNDED, TokenWeights, effective_sample_size, engine_kl, token_weights
from verl.algorithms.kl import KL_ESTIMATORS
from verl.algorithms.policy_loss import LossInputs
from verl.batch import PackedBatch
from verl.transfer.bucket import BucketHandle, BucketLayout, BucketSender, OpenSender, plan
from verl.workers.fsdp_engine import FSDPEngine
from verl.workers.model import PackedPolicy, published_names


@dataclass(frozen=True, slots=True)
class Publication:
    """What a rank publishes, and over what."""

    layouts: list[BucketLayout]
    outlet: BucketSender | None


@dataclass(slots=True)
class PolicyWorker:
    """A sharded policy and the temperature its log-probs are taken at, which is the rollout's."""

    engine: FSDPEngine
    temperature: float
    publication: Publication | None = None  # once connected

    def score(self, packs: Sequence[PackedBatch]) -> list[Tensor]:
        """[A] log-probs of every pack."""
        return self.engine.score(packs, lambda policy, packed: policy(packed, self.temperature, False).logprobs)

    def update(self, packs: Sequence[PackedBatch], algorithm: Algorithm) -> dict[str, float]:
        """One optimizer step on the packs' columns.

        advantages, weight, metric_weight; old_logprobs, or the policy's own of this moment where that column is
        missing; ref_logprobs if KL is in the loss; selected if the algorithm treats tokens apart; rollout_logprobs and
        gap_weight for the gap between engine and trainer and its correction.
        """

        def loss(policy: Any, packed: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
            return policy_loss(policy, packed, algorithm, self.temperature)

        metrics = self.engine.update(packs, loss)
        square = metrics.pop("correction_weight_square")
        return {**metrics, "correction_ess": effective_sample_size(metrics["correction_weight_mean"], square)}

    def sft_step(self, packs: Sequence[PackedBatch]) -> dict[str, float]:
        """One optimizer step of supervised learning: the weighted sum of -log p over the packs' trained tokens."""
        return self.engine.update(packs, sft_loss)

    def connect(self, open_outlet: OpenSender, dtype: torch.dtype, bucket_bytes: int) -> list[BucketLayout]:
        """Get ready for publications in `dtype`; the buckets they will consist of.

        open_outlet: makes this rank's end of the transport; None if it gathers with the others and offers nothing
        """
        layouts = plan(published_names(self._policy), dtype, bucket_bytes)
        self.publication = Publication(layouts, None if open_outlet is None else open_outlet())
        return layouts

    def offer(self, number: int) -> BucketHandle | None:
        """Gather one bucket and offer it; a collective."""
        assert self.publication is not None
        layout, outlet = self.publication.layouts[number], self.publication.outlet
        gathered = self.engine.export_weights(self._parameters(layout))
        if outlet is None:
            deque(gathered, maxlen=0)
            return None
        flat = outlet.buffer(layout)
        for (_, view), (_, full) in zip(layout.unpack(flat), gathered, strict=True):
            view.copy_(full.detach())
        return outlet.offer(layout, flat)

    def begin_publication(self) -> None:
        """Updates are over; the engines will want memory."""
        self.engine.put_away_optimizer()

    def end_publication(self) -> None:
        """All engines have all weights, and the trainer rests until the next rollouts are there."""
        assert self.publication is not None
        if self.publication.outlet is not None:
            self.publication.outlet.release()
        self.engine.offload_all()

    def _parameters(self, layout: BucketLayout) -> Iterator[tuple[str, nn.Parameter]]:
        """Looked up when the engine asks for the first: FSDP puts others in their place while it has them gathered."""
        parameters = dict(published_names(self._policy))
        for piece in layout.pieces:
            yield piece.names[0], parameters[piece.names[0]]

    @property
    def _policy(self) -> PackedPolicy:
        assert isinstance(self.engine.module, PackedPolicy)
        return self.engine.module


def sft_loss(policy: Any, packed: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """The pack's share of the weighted negative log-likelihood of the trained tokens."""
    logprobs_A = policy(packed, 1.0, False).logprobs
    return -(logprobs_A * packed.columns["weight"]).sum(), {}


def policy_loss(
    policy: Any, packed: PackedBatch, algorithm: Algorithm, temperature: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The pack's share of the loss, and of the metrics' token means.

    loss = sum of weight * (correction * policy loss + KL coefficient * KL - entropy coefficient * entropy)

    The trainer's log-probs before the update are those of this moment where no column holds them, so that a step's only
    update is corrected without a pass before it.
    """
    output = policy(packed, temperature, True)
    column = packed.columns
    trainer_A = column["old_logprobs"] if "old_logprobs" in column else output.logprobs.detach()
    old_A = column["rollout_logprobs"] if algorithm.old_logprobs is OldLogprobs.ROLLOUT else trainer_A
    inputs = LossInputs(output.logprobs, old_A, column["advantages"], packed.sample, column.get("selected"))
    token = algorithm.policy_loss(inputs)
    correction, rollout_A = algorithm.correction, column["rollout_logprobs"]
    weights = token_weights(correction or UNBOUNDED, trainer_A, rollout_A, packed.sample)
    loss_A = token.loss_T if correction is None else token.loss_T * weights.weight_T
    if algorithm.entropy_coefficient:  # a product with 0 would still send a gradient of zeros through all logits
        loss_A = loss_A - algorithm.entropy_coefficient * output.entropy
    facts = {**token.metrics_T, "entropy": output.entropy.detach()}
    if algorithm.kl.placement is KLPlacement.LOSS:
        divergence_A = KL_ESTIMATORS[algorithm.kl.estimator](output.logprobs, column["ref_logprobs"])
        loss_A = loss_A + algorithm.kl.coefficient * divergence_A
        facts["kl"] = divergence_A.detach()
    means = {name: (fact_A * column["metric_weight"]).sum() for name, fact_A in facts.items()}
    facts_of_engine = {**_engine_gap(column, trainer_A), **_told_of(weights, column, trainer_A)}
    return (loss_A * column["weight"]).sum(), {**means, **facts_of_engine}


def _engine_gap(column: Any, trainer_A: Tensor) -> dict[str, Tensor]:
    """How far the engine's log-probs are from the trainer's, on the very tokens that the engine sampled.

    Trained tokens that it did not sample (observations) are left out.
    """
    gap_A = (column["rollout_logprobs"] - trainer_A).nan_to_num(0.0)
    largest = gap_A.abs().max() if len(gap_A) else gap_A.new_zeros(())
    weight_A = column["gap_weight"]
    return {
        "engine_gap_mean": (gap_A.abs() * weight_A).sum(),
        "engine_gap_max": largest,
        "engine_kl": (gap_A * weight_A).sum(),
    }


def _told_of(weights: TokenWeights, column: Any, trainer_A: Tensor) -> dict[str, Tensor]:
    """The correction's weights on the tokens that the engine sampled, and how far the two policies are apart there."""
    mean_A = torch.where(column["rollout_logprobs"].isnan(), 0.0, column["gap_weight"])
    weight_A = weights.weight_T
    facts = {
        "mismatch_kl": engine_kl(trainer_A, column["rollout_logprobs"]),
        "weight_mean": weight_A,
        "weight_square": weight_A.square(),
        "truncated": weights.truncated_T,
        "masked": weights.masked_T,
    }
    largest = weight_A.max() if len(weight_A) else weight_A.new_zeros(())
    means = {f"correction_{name}": (fact_A * mean_A).sum() for name, fact_A in facts.items()}
    return {**means, "correction_weight_max": largest}
