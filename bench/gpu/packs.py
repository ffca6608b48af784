"""Packs in the real update: time by kernel class, MFU and memory, beside what is counted; and the way to host memory.

A pack's time is half of the difference between updates of three packs and of one: it has no optimizer step. Classes are
from the profiler, of an update of one pack.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.gpu.inputs import once, seconds, shape
from bench.gpu.measurements import Figures, UnexpectedError
from bench.gpu.place import Place
from bench.gpu.trainer import alone, build, is_fused, kept_bytes, minibatch, packs_of
from bench.local import PLAIN_GRPO
from toolrl.check.plan.cost import PassCost, pack_of_groups, policy_pass
from verl.batch.packed import PackedBatch
from verl.tracking.flops import peak_flops
from verl.transfer.bucket import BucketLayout, digest
from verl.units import GIB
from verl.workers.fsdp_engine import Offload
from verl.workers.policy_worker import policy_loss

GROUPS = (3, 5, 8)  # per pack: 5,700 to 15,200 tokens
LOSS = partial(policy_loss, algorithm=PLAIN_GRPO, temperature=1.0)
CLASSES = {  # of kernels, by name; the first that matches
    "attention": r"flash|fmha|attention|varlen",
    "matrix multiplications": r"gemm|gemv|nvjet|cutlass|cublas|aten::(mm|addmm|bmm)\b",
    "copies": r"memcpy|memset",
    "everything else": "",
}


class Packs:
    """One rank of the measured model, which may move to host memory."""

    def __init__(self, place: Place) -> None:
        self.place, self._stack = place, ExitStack()
        self._stack.enter_context(alone(place))
        self._config = shape(place)
        self._engine = build(place, self._config, offload=Offload(params=True, optimizer=True))
        self._update([self._pack(1)])  # a warm-up

    def packs(self) -> Figures:
        """Every size first as it comes, with what is compiled for it, and then warm."""
        figures = Figures()
        for groups in GROUPS:
            packed, counted = self._pack(groups), self._counted(groups)
            label = f"a pack of {len(packed.token_ids):,} tokens"
            figures[f"{label}, first update: ms"] = 1000 * once(lambda each=packed: self._update([each]), self.place)
            three = seconds(lambda each=packed: self._update([each] * 3), self.place, 3)
            one = seconds(lambda each=packed: self._update([each]), self.place, 3)
            figures[f"{label}, forward and backward: ms"] = 500 * (three - one)
            figures |= self._mfu(label, counted, (three - one) / 2)
        figures |= {
            "an optimizer step: ms": 1000 * (one - (three - one) / 2),
            f"{label}, score: ms": 1000 * seconds(lambda: self._score(packed), self.place, 3),
            **by_class(self.place, partial(self._update, [packed])),
            "counted: GEMM TFLOP": counted.total.gemm_flops / 1e12,
            "counted: attention TFLOP": counted.total.attention_flops / 1e12,
            "counted: other traffic, GB": counted.total.traffic / 1e9,
            "counted: kernels": counted.total.kernels,
            "counted: peak of the pass, GiB": counted.peak / GIB,
        }
        return figures | self._peak(packed)

    def offload(self) -> Figures:
        """Parameters and optimizer state, there and back. Raises UnexpectedError if a parameter has changed."""
        packed = self._pack(1)
        before = self._digests()
        figures: Figures = {
            "weights and optimizer state: GiB": sum(each.nbytes for each in self._tensors()) * 3 / GIB,
            "to host memory: s": once(self._engine.offload_all, self.place),
            "weights back: s": once(lambda: self._score(packed), self.place),
        }
        changed = [name for name, found in self._digests().items() if found != before[name]]
        figures["an update, with the optimizer state's way back: s"] = once(lambda: self._update([packed]), self.place)
        if changed:
            raise UnexpectedError(f"{len(changed)} weights changed on their way, {changed[0]} first", figures)
        return figures

    async def close(self) -> None:
        """Leave the process group."""
        self._stack.close()

    def _update(self, packs: list[PackedBatch]) -> None:
        self._engine.update(packs, LOSS)

    def _score(self, packed: PackedBatch) -> None:
        self._engine.score([packed], lambda policy, each: policy(each, 1.0, False).logprobs)

    def _pack(self, groups: int) -> PackedBatch:
        (packed,) = packs_of(minibatch(self.place, groups, self._config.vocab_size))
        return packed

    def _counted(self, groups: int) -> PassCost:
        packed, fused = pack_of_groups(groups, *self.place.lengths), is_fused(self.place)
        return policy_pass(self._config, packed, fused=fused, kept_bytes=kept_bytes(self.place))

    def _mfu(self, label: str, counted: PassCost, took: float) -> Figures:
        peak = None if self.place.rehearse else peak_flops(torch.cuda.get_device_name())
        done = counted.total.gemm_flops + counted.total.attention_flops
        return {} if peak is None else {f"{label}: share of the device's peak FLOP/s": done / (took * peak)}

    def _peak(self, packed: PackedBatch) -> Figures:
        if self.place.rehearse:
            return {}
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self._engine.backward([packed], LOSS)
        peak = torch.cuda.max_memory_allocated() - before
        self._engine.module.zero_grad()
        return {"peak of the pass with float32 gradients: GiB": peak / GIB}

    def _tensors(self) -> list[Tensor]:
        return [each.to_local() for each in self._engine.module.parameters()]  # type: ignore[operator]

    def _digests(self) -> dict[str, str]:
        named = self._engine.module.named_parameters()
        flat = {name: padded(each.to_local()) for name, each in named}  # type: ignore[operator]
        return {name: digest(BucketLayout(0, each.dtype, (), each.numel()), each) for name, each in flat.items()}


def padded(weight: Tensor) -> Tensor:
    """Flat, and as long as the checksum needs: a multiple of 512 bytes."""
    flat = weight.detach().flatten()
    return torch.nn.functional.pad(flat, (0, -flat.numel() % (512 // flat.itemsize)))


def by_class(place: Place, work: Callable[[], object]) -> Figures:
    """Milliseconds of the device by class, and the number of kernels, without the calls that launch them."""
    on_gpu = place.device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        work()
    spent: Counter[str] = Counter()
    where = DeviceType.CUDA if on_gpu else DeviceType.CPU
    events = [event for event in found.key_averages() if event.device_type == where]
    for event in events:
        name = next(name for name, pattern in CLASSES.items() if re.search(pattern, event.key, re.IGNORECASE))
        spent[name] += (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1000
    figures: Figures = {f"an update of one pack, {name}: ms": spent[name] for name in CLASSES}
    kernels = sum(event.count for event in events if not re.search(CLASSES["copies"], event.key, re.IGNORECASE))
    return {**figures, "an update of one pack: kernels": float(kernels)}
