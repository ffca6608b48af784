"""The policy on one training rank: score a shard, update on it, send weights."""

from collections import deque
from collections.abc import Collection, Container, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.correction import UNBOUNDED, TokenWeights, effective_sample_size, engine_kl, token_weights
from verl.algorithms.cross_entropy import cross_entropy
from verl.algorithms.distillation import top_divergence
from verl.algorithms.kl import loss_divergence
from verl.algorithms.losses.policy_loss import LossInputs
from verl.algorithms.names import KLPlacement, OldLogprobs
from verl.batch.experience import with_advantages
from verl.batch.packed import PackedBatch
from verl.batch.packing import Shard
from verl.batch.token_batch import Floats, top_type
from verl.batch.trace import LOSS, UNWEIGHTED, Trace, Tracer, TraceTokens
from verl.lora import adapted_layers, adapter_tensors, base_alone, with_updates
from verl.transfer.bucket import NUM_SLOTS, BucketHandle, BucketLayout, BucketSender, OpenSender, plan
from verl.transfer.stream import Address, Outlet
from verl.workers.fsdp_engine import FSDPEngine, PackMetric, UpdateResult
from verl.workers.model import PackedPolicy, hf_named_parameters

_DECAY = ".A_log"  # of the states of gated delta nets and Mamba2


@dataclass(slots=True)
class PolicyWorker:
    """A sharded policy and the temperature of its log-probs, which is the rollout's.

    sends_adapter: whether a weight sync sends the adapter alone
    without_adapter: whether it scores by the frozen base, as the reference of a policy that trains an adapter
    """

    engine: FSDPEngine
    temperature: float
    sends_adapter: bool = False
    without_adapter: bool = False
    host: str = "127.0.0.1"  # of this rank, where engines reach it
    num_ids: int | None = None  # of a teacher: token ids that the policy has, the first of its own; None: all
    layouts: Sequence[BucketLayout] = ()  # buckets of the weight sync; set by `connect`, like the next
    sender: BucketSender | None = None  # this rank's end of the transport
    outlet: Outlet | None = None  # its connections to engines, from `begin_weight_sync` to `send_weights`
    traced: Container[int] | None = None  # samples whose tokens are traced; None: no update is traced
    traces: list[Trace] = field(default_factory=list)
    merged: Tensor | None = None  # [2] of this weight sync: what arrives of the adapter's updates, and all of them

    def score(self, shard: Shard) -> Floats:
        """[A] log-probs of the shard's trained tokens."""
        with base_alone(self.engine.module) if self.without_adapter else nullcontext():
            scores = self.engine.score(shard, lambda policy, packed: policy(packed, self.temperature, False).logprobs)
        return torch.cat(scores).float().numpy()

    def top(self, shard: Shard, k: int) -> npt.NDArray[np.void]:
        """[A] the k likeliest tokens in place of the shard's trained ones, with their log-probs."""
        num_ids = self.num_ids

        def scored(policy: Any, packed: PackedBatch) -> Tensor:
            ids_AK, logprobs_AK = policy(packed, self.temperature, False, k, num_ids)
            return torch.stack([ids_AK.int(), logprobs_AK.view(torch.int32)])  # bits of the floats, in one tensor

        ids_AK, bits_AK = torch.cat(self.engine.score(shard, scored), dim=1).numpy()
        found = np.empty(len(ids_AK), dtype=top_type(k))
        found["ids"], found["logprobs"] = ids_AK, bits_AK.view(np.float32)
        return found

    def entropies(self, shard: Shard) -> Floats:
        """[A] entropies at the shard's trained tokens."""
        scores = self.engine.score(shard, lambda policy, packed: policy(packed, self.temperature, True).entropy)
        return torch.cat(scores).float().numpy()

    def update(self, shard: Shard, algorithm: Algorithm, compare_engine: bool) -> UpdateResult:
        """One optimizer step.

        The shard has rollout log-probs and weights; ref_logprobs and selected are there if the algorithm uses them.
        Without old_logprobs the policy's current ones, detached, are the old ones. Without advantages they are
        estimated by these, pack by pack; all samples of a group are in one pack then.
        compare_engine: whether to measure the difference between engine and trainer
        """
        advantages = PackAdvantages(shard, algorithm) if shard.batch.advantages is None else None
        tracer = None if self.traced is None else Tracer(shard.batch, self.traced)
        loss = partial(
            policy_loss,
            algorithm=algorithm,
            temperature=self.temperature,
            compare_engine=compare_engine,
            estimate=advantages,
            trace=None if tracer is None else tracer.add,
        )
        result = self.engine.update(shard, loss)
        if tracer is not None:
            self.traces.append(tracer.trace())
        return result if advantages is None else replace(result, logprobs=np.concatenate(advantages.logprobs))

    def start_trace(self, samples: Container[int]) -> None:
        """Trace the following updates. samples: those whose tokens are traced, by `TokenBatch.numbers`"""
        self.traced, self.traces = samples, []

    def end_trace(self) -> list[Trace]:
        """The traces of this rank's shards, by update."""
        self.traced = None
        return self.traces

    def sft_step(self, shard: Shard) -> UpdateResult:
        """One optimizer step of supervised fine-tuning: the weighted sum of -log p over the shard's trained tokens."""
        return self.engine.update(shard, sft_loss)

    def connect(self, open_sender: OpenSender, dtype: torch.dtype, bucket_bytes: int) -> Sequence[BucketLayout]:
        """Prepare weight sync in `dtype`; returns its buckets. open_sender: None if the rank only takes part"""
        self.layouts = _buckets(list(self._sent()), dtype, self.engine.compute_dtype, bucket_bytes)
        self.sender = None if open_sender is None else open_sender()
        return self.layouts

    def send_bucket(self, number: int, version: int) -> BucketHandle | None:
        """Gather one bucket and send it as part of `version`. Collective."""
        layout = replace(self.layouts[number], version=version)
        gathered = with_updates(
            adapted_layers(self._policy.model), self._parameters(layout), self.engine.export_weights
        )
        if self.sender is None:
            deque(gathered, maxlen=0)
            return None
        flat = self.sender.buffer(layout)
        for (_, view), (_, full, update) in zip(layout.unpack(flat), gathered, strict=True):
            view.copy_(full.detach() if update is None else full.float() + update)
            if update is not None:
                arrived = ((view.float() - full.float()) * update).sum()
                kept = torch.stack([arrived, update.square().sum()])
                self.merged = kept if self.merged is None else self.merged + kept
        return self.sender.send(layout, flat)

    def begin_weight_sync(self) -> Address | None:
        """Offload the optimizer state: updates are over and the engines need the memory.

        Returns where engines connect for the weights; None if this rank does not send.
        """
        self.engine.offload_optimizer()
        if self.outlet is not None:  # of a weight sync that was given up
            self.outlet.close()
        self.outlet = None if self.sender is None else Outlet(self.host, NUM_SLOTS)
        return None if self.outlet is None else self.outlet.address

    def send_weights(self, keys: Collection[bytes], version: int) -> None:
        """Gather all buckets and send them as `version`. Collective. keys: of the engines that this rank sends to"""
        buckets = ((replace(each, version=version), self.send_bucket(each.number, version)) for each in self.layouts)
        if self.outlet is None:
            deque(buckets, maxlen=0)
        else:
            self.outlet.send(keys, buckets)

    def end_weight_sync(self) -> float | None:
        """All engines have all weights: free the buffers and offload until the next scores.

        Returns the share of the adapter's update that is left in the merged weights after rounding: of its projection
        on itself. None if none was merged here.
        """
        if self.sender is not None:
            self.sender.release()
        self.engine.offload_all()
        arrived, self.merged = self.merged, None
        return None if arrived is None or arrived[1] == 0 else float(arrived[0] / arrived[1])

    def _parameters(self, layout: BucketLayout) -> Iterator[tuple[str, nn.Parameter]]:
        """A generator: the lookup must wait until the engine iterates, because FSDP replaces gathered parameters."""
        parameters = dict(self._sent())
        for each in layout.slices:
            yield each.names[0], parameters[each.names[0]]

    def _sent(self) -> Iterator[tuple[str, nn.Parameter]]:
        return adapter_tensors(self._policy.model) if self.sends_adapter else hf_named_parameters(self._policy)

    @property
    def _policy(self) -> PackedPolicy:
        assert isinstance(self.engine.module, PackedPolicy)
        return self.engine.module


def _buckets(
    named: Sequence[tuple[str, Tensor]], dtype: torch.dtype, compute_dtype: torch.dtype, bucket_bytes: int
) -> list[BucketLayout]:
    """Buckets in the engine's dtype; those of decays, which it holds in float32, as exact as the trainer computes."""
    decays = [(name, each) for name, each in named if name.endswith(_DECAY)]
    if not decays or dtype.itemsize >= compute_dtype.itemsize:
        return plan(named, dtype, bucket_bytes)
    layouts = plan([(name, each) for name, each in named if not name.endswith(_DECAY)], dtype, bucket_bytes)
    exact = plan(decays, compute_dtype, bucket_bytes)
    return [*layouts, *(replace(each, number=len(layouts) + each.number) for each in exact)]


class PackAdvantages:
    """Advantages of the shard's packs, which hold whole groups, from the log-probs of each, in turn."""

    def __init__(self, shard: Shard, algorithm: Algorithm) -> None:
        self._parts, self._algorithm = shard.parts(), algorithm
        self.logprobs: list[Floats] = []  # by pack, [A]

    def __call__(self, logprobs_A: Tensor) -> Tensor:
        part, known_A = next(self._parts), logprobs_A.float().cpu().numpy()
        self.logprobs.append(known_A)
        if len(part):
            part = with_advantages(replace(part, old_logprobs=known_A), self._algorithm)
        return torch.from_numpy(part.advantages).to(logprobs_A.device)


def sft_loss(policy: Any, packed: PackedBatch) -> tuple[Tensor, dict[str, PackMetric]]:
    """The pack's share of the weighted negative log-likelihood of the trained tokens."""
    assert packed.loss_weights is not None
    logprobs_A = policy(packed, 1.0, False).logprobs
    return cross_entropy(logprobs_A, packed.loss_weights).sum(), {}


def policy_loss(
    policy: Any,
    packed: PackedBatch,
    algorithm: Algorithm,
    temperature: float,
    compare_engine: bool = True,
    trace: TraceTokens | None = None,
    estimate: PackAdvantages | None = None,
) -> tuple[Tensor, dict[str, PackMetric]]:
    """The pack's share of the loss, and of the metrics' token means.

    loss = sum over trained tokens of weight * (importance weight * policy loss + KL coefficient * KL
                                                - entropy coefficient * entropy + teacher weight * KL to the teacher)
           + sum over trained tokens and observations of nll weight * -log p

    The second term is the KL loss (veRL's use_kl_loss), the third the entropy bonus. The fourth one is over the
    teacher's likeliest tokens, and 0 where the policy did not sample the token. The last one is the cross-entropy: its
    weights hold a mask and a denominator of its own.

    Without old log-probs the trainer's are the current ones, so a step's first update is corrected without an extra
    forward pass. estimate: of the advantages, where the pack has none
    """
    rollout_A, weight_A = packed.rollout_logprobs, packed.loss_weights
    assert rollout_A is not None and weight_A is not None
    output = policy(packed, temperature, True)
    logprobs_A, entropy_A = (each[: len(packed.sample)] for each in (output.logprobs, output.entropy))
    trainer_A = logprobs_A.detach() if packed.old_logprobs is None else packed.old_logprobs
    advantages_A = packed.advantages if estimate is None else estimate(trainer_A)
    assert advantages_A is not None
    old_A = rollout_A if algorithm.old_logprobs is OldLogprobs.ROLLOUT else trainer_A
    token = algorithm.policy_loss(LossInputs(logprobs_A, old_A, advantages_A, packed.sample, packed.selected))
    correction = algorithm.correction
    weights = token_weights(correction or UNBOUNDED, trainer_A, rollout_A, packed.sample)
    loss_A = token.loss_T if correction is None else token.loss_T * weights.weight_T
    if algorithm.entropy_coefficient:  # a product with 0 would still backpropagate zeros through all logits
        loss_A = loss_A - algorithm.entropy_coefficient * entropy_A
    metrics_A = {**token.metrics_T, "entropy": entropy_A.detach()}
    if algorithm.kl.placement is KLPlacement.LOSS:
        assert packed.ref_logprobs is not None
        divergence_A = loss_divergence(algorithm.kl.estimator, logprobs_A, packed.ref_logprobs, old_A)
        loss_A = loss_A + algorithm.kl.coefficient * divergence_A
        metrics_A["kl"] = divergence_A.detach()
    if algorithm.teacher_top_k:
        assert output.top is not None and packed.top_logprobs is not None
        divergence_A = torch.where(rollout_A.isnan(), 0.0, top_divergence(output.top, packed.top_logprobs))
        loss_A = loss_A + algorithm.teacher_weight * divergence_A
        metrics_A["teacher_kl"] = divergence_A.detach()
    weighted_A = loss_A * weight_A
    if algorithm.likelihood is not None:
        assert packed.nll_weights is not None
        nll_weight_A = packed.nll_weights[: len(weight_A)]
        nll_A = cross_entropy(logprobs_A, nll_weight_A)
        weighted_A, loss_A = weighted_A + nll_A, loss_A + nll_A / weight_A
        metrics_A["selected_fraction"] = (nll_weight_A > 0).to(loss_A.dtype)
    means = {name: (each_A * packed.metric_weight).sum() for name, each_A in metrics_A.items()}
    metrics = {f"actor/{name}": PackMetric((mean,)) for name, mean in means.items()}
    if compare_engine:
        metrics |= _engine_metrics(weights, rollout_A, trainer_A, packed.sampled_weight)
    loss = weighted_A.sum()
    if algorithm.observation_coefficient:
        assert packed.nll_weights is not None
        nll_C = cross_entropy(output.logprobs[len(weight_A) :], packed.nll_weights[len(weight_A) :])
        loss = loss + nll_C.sum()
        metrics["actor/observation_loss"] = PackMetric((nll_C.sum() / algorithm.observation_coefficient,))
        metrics["actor/observation_tokens"] = PackMetric((nll_C.new_tensor(len(nll_C)),))
    if trace is not None:
        values = {"logprobs": logprobs_A, "entropy": entropy_A, LOSS: weighted_A, UNWEIGHTED: loss_A}
        importance_A = None if correction is None else weights.weight_T
        some = {
            "old_logprobs": packed.old_logprobs,
            "ratio": token.ratio_T,
            "clipped": token.metrics_T.get("clip_fraction"),
            "importance": importance_A,
            "teacher_kl": metrics_A.get("teacher_kl"),
        }
        trace(packed, {**values, **{name: each for name, each in some.items() if each is not None}})
    return loss, metrics


def _engine_metrics(
    weights: TokenWeights, rollout_A: Tensor, trainer_A: Tensor, weight: float
) -> dict[str, PackMetric]:
    """Difference between the engine's and the trainer's log-probs, and the importance weights that correct it.

    Over the tokens that the engine sampled: trained tokens that it did not sample (observations) are left out.
    """
    mean_A = torch.where(rollout_A.isnan(), 0.0, weight)
    diff_A = (rollout_A - trainer_A).nan_to_num(0.0)
    weight_A = weights.weight_T
    mean = (weight_A * mean_A).sum()
    return {
        "engine/logprob_diff_mean": PackMetric(((diff_A.abs() * weight).sum(),)),
        "engine/logprob_diff_max": _largest(diff_A.abs()),
        "engine/kl": PackMetric(((diff_A * weight).sum(),)),
        "correction/engine_kl": PackMetric(((engine_kl(trainer_A, rollout_A) * mean_A).sum(),)),
        "correction/weight_mean": PackMetric((mean,)),
        "correction/weight_max": _largest(weight_A),
        "correction/ess": PackMetric((mean, (weight_A.square() * mean_A).sum()), finish=effective_sample_size),
        "correction/truncated": PackMetric(((weights.truncated_T * mean_A).sum(),)),
        "correction/masked": PackMetric(((weights.masked_T * mean_A).sum(),)),
    }


def _largest(values_A: Tensor) -> PackMetric:
    return PackMetric((values_A.max() if len(values_A) else values_A.new_zeros(()),), maximum=True)
