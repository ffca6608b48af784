"""Cost of a pass over a pack on a GPU: kernels, FLOPs, memory traffic and memory, counted without one.

The trainer's own modules and losses run on meta tensors, which have shapes and no data, and for which they choose what
they would on a GPU. Every kernel that torch would launch is counted:

    matrix multiplications   their FLOPs; their memory traffic is hidden behind them
    attention                4 * query width * (pairs of a query and a key that it sees), 2.5 times that backward; if
                             query heads share key heads, a kernel each sums the gradients of keys and values over them
    everything else          bytes read and written: all inputs and outputs once, or by TRAFFIC

Memory is counted by storage, from its allocation to its release. Not counted: sharding (`sharding_traffic`), the
optimizer, communication, and what allocators and kernels add.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import add, sub
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from toolrl.check.plan import liger_cost
from verl.algorithms.algorithm import KLTerm
from verl.algorithms.estimators.grpo import GRPO
from verl.algorithms.names import KLPlacement
from verl.batch.packed import PackedBatch, Segment
from verl.workers import attention
from verl.workers.fused import fuse
from verl.workers.model import PackedCritic, PackedPolicy, head_size
from verl.workers.policy_worker import policy_loss

_META = torch.device("meta")
_GEMMS = {"aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm"}
_COUNTED = 3  # layers: the first, the last, which selects positions (`pre_norm.py`), and one between them
_ATTENTION_BACKWARD = 2.5  # five matrix products instead of two
# Operators without a kernel, beside views.
_FREE = {"aten::detach", "aten::empty_like", "aten::empty", "aten::new_empty", "aten::_unsafe_view", "aten::lift_fresh"}

PackLoss = Callable[[Any, PackedBatch], Tensor]
Wrapper = Callable[[PreTrainedModel, bool], PackedPolicy]


@dataclass(frozen=True, slots=True)
class _Counts:
    """Counts that are added field by field."""

    def __add__(self, other: Self) -> Self:
        return self._each(add, other)

    def __sub__(self, other: Self) -> Self:
        return self._each(sub, other)

    def __mul__(self, times: float) -> Self:
        return self._each(lambda value: value * times)

    def _each(self, function: Callable[..., Any], *others: Self) -> Self:
        values = ([getattr(each, field.name) for each in (self, *others)] for field in fields(self))
        return type(self)(*(function(*each) for each in values))


@dataclass(frozen=True, slots=True)
class Cost(_Counts):
    """Work of a GPU."""

    kernels: float = 0.0
    gemm_flops: float = 0.0
    attention_flops: float = 0.0
    traffic: float = 0.0  # bytes read and written by everything else


@dataclass(frozen=True, slots=True)
class PassCost(_Counts):
    """Forward and backward over one pack. saved, peak: bytes beside the parameters"""

    forward: Cost
    backward: Cost
    saved: float  # between forward and backward
    peak: float

    @property
    def total(self) -> Cost:
        return self.forward + self.backward


def size(*tensors: Any) -> int:
    """Bytes of all tensors among the values."""
    return sum(each.numel() * each.element_size() for each in tree_leaves(tensors) if isinstance(each, Tensor))


def _bytes_in_and_out(args: Sequence[Any], out: Any) -> int:
    return size(_on_meta(args), _on_meta(out))


def _bytes_indexed(args: Sequence[Any], out: Any) -> int:
    """Only what is selected is read."""
    return 2 * size(out) + size(args[1:])


def _bytes_added_at(args: Sequence[Any], out: Any) -> int:
    """In place: index, values, and the elements that they are added to."""
    return size(args[1:]) + 2 * size(args[-1] if isinstance(args[-1], Tensor) else args[2])


# Bytes moved by an operator, from its arguments and its output, where they are not those of all inputs and outputs. A
# fused kernel that reads or writes a tensor more than once, or only a part, belongs here under its name.
TRAFFIC: Mapping[str, Callable[[Sequence[Any], Any], int]] = {
    "aten::gather": _bytes_indexed,
    "aten::index": _bytes_indexed,
    "aten::embedding": lambda args, out: 2 * size(out) + size(args[1]),
    "aten::scatter_add_": _bytes_added_at,
    "aten::index_put_": _bytes_added_at,
    "aten::_index_put_impl_": _bytes_added_at,
    "aten::index_put": lambda args, out: 2 * size(out) + _bytes_added_at(args, out),
    "aten::embedding_dense_backward": lambda args, out: size(out) + 3 * size(args[0]),
    "aten::zeros_like": lambda args, out: size(out),
    "aten::ones_like": lambda args, out: size(out),
    "aten::new_zeros": lambda args, out: size(out),
    "aten::fill_": lambda args, out: size(out),
    "aten::zero_": lambda args, out: size(out),
    "aten::copy_": lambda args, out: size(args[1], out),
    "verl::logit_gradient_": lambda args, out: 2 * size(args[0]) + size(args[1:]),
    # half of the angles is read: the second half repeats the first
    "liger::rotary": lambda args, out: 2 * size(args[:2]) + size(args[2:]) // 2,
    "liger::silu_mul_backward": lambda args, out: size(args[0]) + 2 * size(args[1:]),
    # torch computes maximum, differences, their exponentials in place, and the sum
    "aten::logsumexp": lambda args, out: 6 * size(args[0]),
}


class CostCounter(TorchDispatchMode):
    """Counts what is executed on meta tensors while it is active; `kernels` and `traffic` are by operator.

    pair_flops: of one forward attention over the pack
    """

    def __init__(self, pair_flops: float = 0.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: Counter[str] = Counter()
        self.traffic: Counter[str] = Counter()
        self.gemm_flops = self.attention_flops = 0.0
        self.live = self.peak = 0.0
        self._pair_flops = pair_flops
        self._storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        name, options = func._schema.name, kwargs or {}
        out = func(*args, **options)
        created = _on_meta(out)
        if func.is_view or not (created or _on_meta((args, options))):
            return out
        for tensor in created:
            self._allocate(tensor.untyped_storage())
        if name not in _FREE:
            self._count(name, [*args, *options.values()], out)
        return out

    def cost(self) -> Cost:
        """Since the last call."""
        counted = Cost(self.kernels.total(), self.gemm_flops, self.attention_flops, self.traffic.total())
        self.kernels, self.traffic = Counter(), Counter()
        self.gemm_flops = self.attention_flops = 0.0
        return counted

    def _count(self, name: str, args: Sequence[Any], out: Any) -> None:
        self.kernels[name] += 1
        if name in _GEMMS:
            matrices = [each for each in args if isinstance(each, Tensor)]["addmm" in name :]
            self.gemm_flops += 2.0 * matrices[0].numel() * matrices[1].shape[-1]
        elif "varlen" in name or "flash" in name:
            backward = "backward" in name
            self.attention_flops += self._pair_flops * (_ATTENTION_BACKWARD if backward else 1.0)
            if backward:
                self._sum_over_query_heads(name, *args[1:4])
        else:
            self.traffic[name] += TRAFFIC.get(name, _bytes_in_and_out)(args, out)

    def _sum_over_query_heads(self, name: str, query_THD: Tensor, key_UKD: Tensor, value_UKD: Tensor) -> None:
        """FlashAttention 2 writes gradients of keys and values for every query head, and then adds them up."""
        heads, key_heads = query_THD.shape[1], key_UKD.shape[1]
        if heads == key_heads:
            return
        grads = size(key_UKD, value_UKD)
        per_head = grads * heads // key_heads
        self.kernels[name] += 2
        self.traffic[name] += per_head + grads
        self.peak = max(self.peak, self.live + per_head)

    def _allocate(self, storage: torch.UntypedStorage) -> None:
        if storage in self._storages:
            return
        self._storages.add(storage)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, storage.nbytes())

    def _release(self, num_bytes: int) -> None:
        self.live -= num_bytes


def _on_meta(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor) and each.device == _META]


def pack_of_groups(groups: int, prompt: int, response: int, responses: int, shared: bool = True) -> PackedBatch:
    """A pack without data: per group a prompt and its trained responses, the prompt shared or repeated.

    Of a response all but the last token is computed.
    """
    segments: list[Segment] = []
    for _ in range(groups):
        start = segments[-1].end if segments else 0
        if shared:
            first, own = len(segments), response - 1
            starts = [start + prompt + own * at for at in range(responses)]
            segments += [Segment(start, start + prompt), *(Segment(each, each + own, first) for each in starts)]
        else:
            length = prompt + response - 1
            segments += [Segment(start + at * length, start + (at + 1) * length) for at in range(responses)]
    trained = groups * responses * response
    ids = torch.empty(segments[-1].end, dtype=torch.long, device=_META)
    places, values = torch.empty(trained, dtype=torch.long, device=_META), torch.empty(trained, device=_META)
    return PackedBatch(
        token_ids=ids,
        position_ids=ids,
        segments=tuple(segments),
        source=places,
        target=places,
        sample=places,
        advantages=values,
        rollout_logprobs=values,
        old_logprobs=values,
        ref_logprobs=values,
        loss_weights=values,
    )


def attention_pairs(segments: Sequence[Segment]) -> float:
    """Pairs of a query and a key that it attends to; sliding windows are neglected."""
    lengths = [each.end - each.start for each in segments]
    before = [0 if each.prefix is None else lengths[each.prefix] for each in segments]
    return sum(own * (prefix + (own + 1) / 2) for own, prefix in zip(lengths, before, strict=True))


def meta_model(
    config: PretrainedConfig, layers: int, checkpointing: bool = False, fused: bool = True
) -> PreTrainedModel:
    """The first layers of a model in bf16, as FSDP gathers them, without data. fused: with liger-kernel's modules"""
    attention.register()
    values, total = config.to_dict(), config.num_hidden_layers
    cut = {name: each[:layers] for name, each in values.items() if isinstance(each, list) and len(each) == total}
    config = type(config).from_dict({**values, **cut, "num_hidden_layers": layers})
    with _META:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention.PACKED, dtype=torch.bfloat16
        )
    if fused:
        fuse(model, liger_cost)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def count_update(module: nn.Module, loss: PackLoss, packed: PackedBatch) -> PassCost:
    """Forward and backward of a module without data; the gradients of its parameters are new."""
    counter = _counter(module, packed)
    module.train()
    with counter:
        value = loss(module, packed)
        forward, saved = counter.cost(), counter.live
        value.backward()
    return PassCost(forward, counter.cost(), saved, counter.peak)


def count_score(module: nn.Module, packed: PackedBatch) -> PassCost:
    """A policy's forward without gradients."""
    counter = _counter(module, packed)
    module.eval()
    with torch.no_grad(), counter:
        module(packed, 1.0, False)
        return PassCost(counter.cost(), Cost(), 0.0, counter.peak)


def policy_pass(
    config: PretrainedConfig,
    packed: PackedBatch,
    checkpointing: bool = False,
    entropy: bool = False,
    fused: bool = True,
    wrapper: Wrapper = PackedPolicy,
    kept_bytes: int = 0,
) -> PassCost:
    """An update's pass of the policy over a pack.

    The loss is GRPO's with a KL term: those of other presets differ in work per trained token only, which is below a
    thousandth of the whole.
    entropy: whether the loss has an entropy term, whose gradient passes through all logits
    fused: model.fused_kernels, with liger-kernel installed
    kept_bytes: of logits that may be kept for the backward
    """
    algorithm = replace(GRPO, kl=KLTerm(KLPlacement.LOSS, coefficient=1.0), entropy_coefficient=float(entropy))

    def loss(policy: Any, packed: PackedBatch) -> Tensor:
        return policy_loss(policy, packed, algorithm, 1.0)[0]

    def count(layers: int) -> PassCost:
        policy = wrapper(meta_model(config, layers, checkpointing, fused), fused)
        policy.kept_bytes = kept_bytes
        return count_update(policy, loss, packed)

    return over_layers(count, config.num_hidden_layers)


def critic_pass(
    config: PretrainedConfig, packed: PackedBatch, checkpointing: bool = False, fused: bool = True
) -> PassCost:
    """An update's pass of the critic over a pack, with the sum of its values in place of the loss."""

    def count(layers: int) -> PassCost:
        model = meta_model(config, layers, checkpointing, fused)
        with _META:
            module = PackedCritic(model)
        return count_update(module, lambda critic, packed: critic(packed).sum(), packed)

    return over_layers(count, config.num_hidden_layers)


def score_pass(
    config: PretrainedConfig, packed: PackedBatch, fused: bool = True, wrapper: Wrapper = PackedPolicy
) -> PassCost:
    """A pass without gradients, for old or reference log-probs."""

    def count(layers: int) -> PassCost:
        return count_score(wrapper(meta_model(config, layers, fused=fused), fused), packed)

    layers: int = config.num_hidden_layers
    return replace(over_layers(count, layers), peak=count(min(layers, _COUNTED)).peak)  # no layer keeps anything


def over_layers(count: Callable[[int], PassCost], layers: int) -> PassCost:
    """Cost of all layers, from counts of two and of three: every further layer adds the same, the last less.

    The peak is exact where it is in the loss, otherwise (with checkpointing) a lower bound.
    """
    if layers < _COUNTED:
        return count(layers)
    fewer, more = count(_COUNTED - 1), count(_COUNTED)
    return more + (more - fewer) * (layers - _COUNTED)


def _counter(module: Any, packed: PackedBatch) -> CostCounter:
    attention.varlen_plan(packed.segments, _META)  # cached, so that no pass counts it
    config = (module.model if isinstance(module, PackedPolicy) else module.decoder).config
    return CostCounter(4.0 * config.num_attention_heads * head_size(config) * attention_pairs(packed.segments))
