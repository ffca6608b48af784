"""One trainer rank as in a run, in this process, and the packs that it computes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, PretrainedConfig

from bench.gpu.place import Place
from bench.local import PLAIN_GRPO, made_up_groups, minibatch_of
from verl.batch.experience import policy_minibatch
from verl.batch.packed import PackedBatch
from verl.batch.packing import make_units, pack
from verl.batch.token_batch import TokenBatch
from verl.workers import attention
from verl.workers.fsdp_engine import NO_OFFLOAD, FSDPEngine, Offload
from verl.workers.fused import fuse, is_wanted
from verl.workers.logprobs import max_kept_bytes
from verl.workers.model import PackedPolicy, decoder_layers
from verl.workers.optim import OptimizerSettings


@contextmanager
def alone(place: Place) -> Iterator[None]:
    """A process group of size one."""
    backend = "gloo" if place.device == "cpu" else "cpu:gloo,cuda:nccl"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def build(
    place: Place,
    config: PretrainedConfig,
    weights: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    offload: Offload = NO_OFFLOAD,
) -> FSDPEngine:
    """A rank with float32 weights, random unless they are given, that computes in `dtype`, fused on a GPU."""
    attention.register()
    torch.manual_seed(0)
    with torch.device(place.device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.PACKED, dtype=torch.float32)
    if weights is not None:
        model.load_state_dict(weights)
    module = PackedPolicy(model)
    if is_fused(place):
        fuse(model)
        module.kept_bytes = kept_bytes(place)
    mesh = init_device_mesh(place.device, (1,))
    return FSDPEngine(module, decoder_layers(module), mesh, OptimizerSettings(), dtype, offload)


def is_fused(place: Place) -> bool:
    return place.device == "cuda" and is_wanted("auto")


def kept_bytes(place: Place) -> int:
    """Of logits that the rank may keep for its backward."""
    return max_kept_bytes(torch.cuda.mem_get_info()[1]) if is_fused(place) else 0


def minibatch(place: Place, groups: int, vocabulary: int) -> TokenBatch:
    """Groups of random tokens with advantages and weights, and without old log-probs: they are the current ones."""
    prompt, response, responses = place.lengths
    batch = minibatch_of(made_up_groups([(prompt, response)] * groups, responses, vocabulary))
    return policy_minibatch(batch, PLAIN_GRPO)


def packs_of(batch: TokenBatch, shared: bool = True) -> list[PackedBatch]:
    """One pack with shared prompts, or one per sample."""
    units = make_units(batch, shared, 10**6)
    return [pack(units, batch)] if shared else [pack([unit], batch) for unit in units]
