"""How often Triton compiles while packs of ever new sizes are trained on: a few times in the first step, then rarely.

Kernels are looked up as for an H100 and are neither compiled nor launched, so what they would compute is undefined.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig, Qwen2Config, Qwen3Config

from verl.batch.packed import PackedBatch
from verl.batch.packing import assign, make_units, pack
from verl.batch.samples import batch_of, sample_from_completion
from verl.types import Completion, FinishReason
from verl.workers import logprobs
from verl.workers.fused import fuse
from verl.workers.logprobs import token_logprobs
from verl.workers.model import PackedPolicy, hidden_states

pytestmark = [
    pytest.mark.gpuset,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled in the interpreter"),
]
STEPS, PROMPTS, RESPONSES, LIMIT = 10, 512, 4, 16384
VOCABULARY, VOCABULARY_OF_QWEN = 512, 151936


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, Any]]:
    """(kernel, key) of every compilation that the launches so far would need on an H100."""
    importlib.import_module("liger_kernel.ops")
    runtime, compiler, knobs = (
        importlib.import_module(f"triton.{name}") for name in ("runtime", "backends.compiler", "knobs")
    )
    h100 = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda _: 0,
        get_current_target=lambda: compiler.GPUTarget("cuda", 90, 32),
    )
    found: set[tuple[str, Any]] = set()

    def instead(*, key: Any, fn: Any, **_: Any) -> bool:
        found.add((f"{fn.module}.{fn.name}", key))
        return True

    monkeypatch.setattr(runtime.driver, "_active", h100)
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", instead)
    return found


def packs_of_a_step(random: np.random.Generator) -> Iterator[PackedBatch]:
    """Prompts of about 900 tokens, responses of about 250, both log-normal."""
    prompts = random.lognormal(6.8, 0.2, PROMPTS).clip(2, 2048).astype(int)
    responses = random.lognormal(5.3, 0.6, (PROMPTS, RESPONSES)).clip(1, 1024).astype(int)
    samples = [
        sample_from_completion([1] * prompt, Completion([2] * length, [0.0] * length, FinishReason.STOP, 0), group)
        for group, prompt in enumerate(prompts)
        for length in responses[group]
    ]
    batch = batch_of(samples)
    return (pack(units, batch) for units in assign(make_units(batch, True, LIMIT), LIMIT))


def nothing(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Attention without its kernels, which are torch's own: nothing of them is compiled."""
    return query.transpose(1, 2).contiguous() + key.mean() + value.mean(), None


def small_policy(kind: type[PretrainedConfig]) -> PackedPolicy:
    AttentionInterface.register("nothing", nothing)
    sizes: dict[str, int] = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    sizes |= {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = kind(**sizes, head_dim=8, num_hidden_layers=2, vocab_size=VOCABULARY, max_position_embeddings=4096)
    torch.manual_seed(0)
    policy = PackedPolicy(AutoModelForCausalLM.from_config(config, attn_implementation="nothing"))
    fuse(policy.model)
    return policy


def train_on(policy: PackedPolicy, packed: PackedBatch, kept_bytes: int) -> None:
    hidden = hidden_states(policy.model.get_decoder(), packed)
    head = policy.model.get_output_embeddings().weight
    found, _ = token_logprobs(hidden, head, packed.target, with_entropy=True, fused=True, kept_bytes=kept_bytes)
    found.sum().backward()


def by_kernel(found: set[tuple[str, Any]]) -> dict[str, int]:
    names: Sequence[str] = [name for name, _ in found]
    return {name: names.count(name) for name in names}


@pytest.mark.parametrize(
    ("kind", "kept_bytes"),
    [(Qwen2Config, 0), (Qwen3Config, 2**40)],  # logits of slices of the vocabulary, or all of a pack at once
)
def test_new_sizes_of_packs_need_few_compilations(
    kind: type[PretrainedConfig], kept_bytes: int, compiled: set[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = logprobs.LOGITS_AT_ONCE["cuda"] * VOCABULARY // VOCABULARY_OF_QWEN
    monkeypatch.setitem(logprobs.LOGITS_AT_ONCE, "cpu", at_once)
    policy, random, by_step, sizes = small_policy(kind), np.random.default_rng(0), [], set()
    for _ in range(STEPS):
        for packed in packs_of_a_step(random):
            sizes.add(len(packed.token_ids))
            train_on(policy, packed, kept_bytes)
        by_step.append(len(compiled))
    kernels = by_kernel(compiled)
    assert len(sizes) > 300
    assert by_step[-1] - len(kernels) <= 8
    assert by_step[-1] - by_step[0] <= 3  # the first step is the warm-up
