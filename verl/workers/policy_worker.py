"""The policy on one training rank: score packs, update on packs, send weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.correction import UNBOUNDED, TokenWeights, effective_sample_size, engine_kl, token_weights
from verl.algorithms.kl import KL_ESTIMATORS
from verl.algorithms.losses.policy_loss import LossInputs
from verl.algorithms.names import KLPlacement, OldLogprobs
from verl.batch.packed import PackedBatch
from verl.transfer.bucket import BucketHandle, BucketLayout, BucketSender, OpenSender, plan
from verl.workers.fsdp_engine import FSDPEngine
from verl.workers.model import PackedPolicy, hf_named_parameters


@dataclass(frozen=True, slots=True)
class SyncChannel:
    """The buckets of a weight sync, and this rank's end of the transport."""

    layouts: list[BucketLayout]
    sender: BucketSender | None


@dataclass(slots=True)
class PolicyWorker:
    """A sharded policy and the temperature of its log-probs, which is the rollout's."""

    engine: FSDPEngine
    temperature: float
    channel: SyncChannel | None = None  # set by `connect`

    def score(self, packs: Sequence[PackedBatch]) -> list[Tensor]:
        """[A] log-probs of every pack."""
        return self.engine.score(packs, lambda policy, packed: policy(packed, self.temperature, False).logprobs)

    def update(self, packs: Sequence[PackedBatch], algorithm: Algorithm) -> dict[str, float]:
        """One optimizer step on the packs' columns.

        advantages, weight, metric_weight; old_logprobs (default: the policy's current ones, detached); ref_logprobs if
        KL is in the loss; selected if the algorithm treats some tokens differently; rollout_logprobs and gap_weight for
        the log-prob difference between engine and trainer and the off-policy correction.
        """

        def loss(policy: Any, packed: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
            return policy_loss(policy, packed, algorithm, self.temperature)

        metrics = self.engine.update(packs, loss)
        square = metrics.pop("correction_weight_square")
        return {**metrics, "correction_ess": effective_sample_size(metrics["correction_weight_mean"], square)}

    def sft_step(self, packs: Sequence[PackedBatch]) -> dict[str, float]:
        """One optimizer step of supervised fine-tuning: the weighted sum of -log p over the packs' trained tokens."""
        return self.engine.update(packs, sft_loss)

    def connect(self, open_sender: OpenSender, dtype: torch.dtype, bucket_bytes: int) -> list[BucketLayout]:
        """Prepare weight sync in `dtype`; returns its buckets.

        open_sender: makes this rank's end of the transport; None if it takes part in the gather but sends nothing
        """
        layouts = plan(hf_named_parameters(self._policy), dtype, bucket_bytes)
        self.channel = SyncChannel(layouts, None if open_sender is None else open_sender())
        return layouts

    def send_bucket(self, number: int) -> BucketHandle | None:
        """Gather one bucket and send it. Collective."""
        assert self.channel is not None
        layout, sender = self.channel.layouts[number], self.channel.sender
        gathered = self.engine.export_weights(self._parameters(layout))
        if sender is None:
            deque(gathered, maxlen=0)
            return None
        flat = sender.buffer(layout)
        for (_, view), (_, full) in zip(layout.unpack(flat), gathered, strict=True):
            view.copy_(full.detach())
        return sender.send(layout, flat)

    def begin_weight_sync(self) -> None:
        """Offload the optimizer state: updates are over and the engines need the memory."""
        self.engine.offload_optimizer()

    def end_weight_sync(self) -> None:
        """All engines have all weights: free the buffers and offload until the next scores."""
        assert self.channel is not None
        if self.channel.sender is not None:
            self.channel.sender.release()
        self.engine.offload_all()

    def _parameters(self, layout: BucketLayout) -> Iterator[tuple[str, nn.Parameter]]:
        """A generator: the lookup must wait until the engine iterates, because FSDP replaces gathered parameters."""
        parameters = dict(hf_named_parameters(self._policy))
        for each in layout.slices:
            yield each.names[0], parameters[each.names[0]]

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

    loss = sum of weight * (importance weight * policy loss + KL coefficient * KL - entropy coefficient * entropy)

    Without a column old_logprobs the trainer's old log-probs are the current ones, so a step with a single update is
    corrected without an extra forward pass.
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
    if algorithm.entropy_coefficient:  # a product with 0 would still backpropagate zeros through all logits
        loss_A = loss_A - algorithm.entropy_coefficient * output.entropy
    metrics = {**token.metrics_T, "entropy": output.entropy.detach()}
    if algorithm.kl.placement is KLPlacement.LOSS:
        divergence_A = KL_ESTIMATORS[algorithm.kl.estimator](output.logprobs, column["ref_logprobs"])
        loss_A = loss_A + algorithm.kl.coefficient * divergence_A
        metrics["kl"] = divergence_A.detach()
    means = {name: (metric_A * column["metric_weight"]).sum() for name, metric_A in metrics.items()}
    return (loss_A * column["weight"]).sum(), {
        **means,
        **_engine_metrics(column, trainer_A),
        **_correction_metrics(weights, column, trainer_A),
    }


def _engine_metrics(column: Any, trainer_A: Tensor) -> dict[str, Tensor]:
    """Difference between the engine's and the trainer's log-probs, over the tokens that the engine sampled.

    Trained tokens that it did not sample (observations) are left out.
    """
    diff_A = (column["rollout_logprobs"] - trainer_A).nan_to_num(0.0)
    largest = diff_A.abs().max() if len(diff_A) else diff_A.new_zeros(())
    weight_A = column["gap_weight"]
    return {
        "engine_logprob_diff_mean": (diff_A.abs() * weight_A).sum(),
        "engine_logprob_diff_max": largest,
        "engine_kl": (diff_A * weight_A).sum(),
    }


def _correction_metrics(weights: TokenWeights, column: Any, trainer_A: Tensor) -> dict[str, Tensor]:
    """Importance weights of the tokens that the engine sampled, and the KL between the two policies there."""
    mean_A = torch.where(column["rollout_logprobs"].isnan(), 0.0, column["gap_weight"])
    weight_A = weights.weight_T
    metrics = {
        "engine_kl": engine_kl(trainer_A, column["rollout_logprobs"]),
        "weight_mean": weight_A,
        "weight_square": weight_A.square(),
        "truncated": weights.truncated_T,
        "masked": weights.masked_T,
    }
    largest = weight_A.max() if len(weight_A) else weight_A.new_zeros(())
    means = {f"correction_{name}": (metric_A * mean_A).sum() for name, metric_A in metrics.items()}
    return {**means, "correction_weight_max": largest}
