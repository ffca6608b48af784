"""One pack of 8 groups (15,200 tokens) in the real update: time by kernel class and memory, beside what is counted.

    bash bench/gpu/first_hour.sh pack

A pack's time is half of the difference between updates of three packs and of one: it has no optimizer step. Classes are
from the profiler, of an update of one pack. Last, parameters and optimizer state move to host memory and back.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from local import PLAIN_GRPO, made_up_groups, minibatch_of
from piece import PROMPT, RESPONSE, RESPONSES, Piece, seconds, shape, start, wait
from torch.autograd import DeviceType
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from verl.batch.experience import with_loss_weights, with_metric_weights
from verl.batch.packed import PackedBatch
from verl.batch.packing import make_units, pack
from verl.kit.plan.cost import pack_of_groups, policy_pass
from verl.workers import attention
from verl.workers.fsdp_engine import FSDPEngine, Offload
from verl.workers.fused import fuse, is_wanted
from verl.workers.logprobs import max_kept_bytes
from verl.workers.model import PackedPolicy, decoder_layers
from verl.workers.optim import OptimizerSettings
from verl.workers.policy_worker import policy_loss

GIB = 2**30
CLASSES = {  # of kernels, by name; the first that matches
    "attention": r"flash|fmha|attention|varlen",
    "matrix multiplications": r"gemm|gemv|nvjet|cutlass|cublas|aten::(mm|addmm|bmm)\b",
    "copies": r"memcpy|memset",
    "everything else": "",
}


def build(piece: Piece, size: str) -> FSDPEngine:
    """One rank that trains a model with random weights, as in a run; it may move to host memory."""
    attention.register()
    torch.manual_seed(0)
    with torch.device(piece.device):
        model = AutoModelForCausalLM.from_config(shape(size), attn_implementation=attention.PACKED, dtype=torch.float32)
    module = PackedPolicy(model)
    if _is_fused(piece):
        fuse(model)
        module.kept_bytes = _kept_bytes(piece)
    mesh = init_device_mesh(piece.device.type, (1,))
    settings, offload = OptimizerSettings(), Offload(params=True, optimizer=True)
    return FSDPEngine(module, decoder_layers(module), mesh, settings, torch.bfloat16, offload)


def _is_fused(piece: Piece) -> bool:
    return piece.device.type == "cuda" and is_wanted("auto")


def _kept_bytes(piece: Piece) -> int:
    return max_kept_bytes(torch.cuda.mem_get_info()[1]) if _is_fused(piece) else 0


def real_pack(groups: int, lengths: tuple[int, int, int], vocabulary: int) -> PackedBatch:
    prompt, response, responses = lengths
    batch = minibatch_of(made_up_groups([(prompt, response)] * groups, responses, vocabulary))
    weighted = with_metric_weights(with_loss_weights(batch, PLAIN_GRPO.aggregation))
    return pack(make_units(weighted, True, 10**6), weighted)


def by_class(piece: Piece, work: partial[object]) -> dict[str, float]:
    """Milliseconds of the device by class, and the number of kernels, without the calls that launch them."""
    on_gpu = piece.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        work()
    spent: Counter[str] = Counter()
    where = DeviceType.CUDA if on_gpu else DeviceType.CPU
    events = [event for event in found.key_averages() if event.device_type == where]
    for event in events:
        name = next(name for name, pattern in CLASSES.items() if re.search(pattern, event.key, re.IGNORECASE))
        spent[name] += (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1000
    figures = {f"an update of one pack, {name}: ms": spent[name] for name in CLASSES}
    kernels = sum(event.count for event in events if not re.search(CLASSES["copies"], event.key, re.IGNORECASE))
    return {**figures, "an update of one pack: kernels": float(kernels)}


def measure(piece: Piece, size: str) -> dict[str, float]:
    groups, lengths = (1, (20, 6, 2)) if piece.rehearse else (8, (PROMPT, RESPONSE, RESPONSES))
    config = shape(size)
    engine, packed = build(piece, size), real_pack(groups, lengths, config.vocab_size)
    loss = partial(policy_loss, algorithm=PLAIN_GRPO, temperature=1.0)
    packs = pack_of_groups(groups, lengths[0], lengths[1], lengths[2])
    counted = policy_pass(config, packs, fused=_is_fused(piece), kept_bytes=_kept_bytes(piece))
    three = seconds(lambda: engine.update([packed] * 3, loss), piece.device, 3)
    one = seconds(lambda: engine.update([packed], loss), piece.device, 3)
    forward = partial(engine.score, [packed], lambda policy, each: policy(each, 1.0, False).logprobs)
    figures = {
        "a pack, forward and backward: ms": 500 * (three - one),
        "an optimizer step: ms": 1000 * (one - (three - one) / 2),
        "a pack, score: ms": 1000 * seconds(forward, piece.device, 3),
        "counted: GEMM TFLOP": counted.total.gemm_flops / 1e12,
        "counted: attention TFLOP": counted.total.attention_flops / 1e12,
        "counted: other traffic, GB": counted.total.traffic / 1e9,
        "counted: kernels": counted.total.kernels,
        "counted: peak of the pass, GiB": counted.peak / GIB,
        **by_class(piece, partial(engine.update, [packed], loss)),
    }
    if piece.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        policy_loss(engine.module, packed.to(piece.device), PLAIN_GRPO, 1.0)[0].backward()
        figures["peak of the pass with float32 gradients: GiB"] = (torch.cuda.max_memory_allocated() - before) / GIB
        engine.module.zero_grad()
    figures["to host memory: s"] = once(engine.offload_all, piece.device)
    figures["an update, with its way back: s"] = once(lambda: engine.update([packed], loss), piece.device)
    return figures


def once(work: Callable[[], object], device: torch.device) -> float:
    """Wall time of work that moves what later calls would find moved."""
    wait(device)
    started = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - started


if __name__ == "__main__":
    piece, arguments = start(__doc__, size={"default": "1.5B"})
    with tempfile.TemporaryDirectory() as folder:
        backend = "cpu:gloo,cuda:nccl" if piece.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        piece.write(measure(piece, piece.size(arguments.size)))
        dist.destroy_process_group()
