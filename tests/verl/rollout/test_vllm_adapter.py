"""Adapters in real vLLM: it computes what the trainer does, and notices one that is damaged, old or unbound."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.conftest import need_vllm
from tests.support.tiny import save_untrained
from tests.support.weight_sync import sync
from tests.verl.rollout.test_hf_engine import trainer_logprobs
from tests.verl.rollout.test_vllm_engine import EOS, LONG, PROMPTS, ROOM, VOCABULARY, Runner
from verl.errors import EngineError, EngineLostError
from verl.lora import Lora, adapter_tensors, add_adapter
from verl.rollout.engine import Sampling
from verl.rollout.vllm_engine import VLLMSettings
from verl.rollout.vllm_extension import not_bound
from verl.transfer.shared_memory import SharedMemory
from verl.workers.model import PackedPolicy, load_causal_lm

need_vllm()

LORA = Lora(rank=4, alpha=8.0, targets=("all-linear",))
TOLERANCE = 1e-4  # nats, in float32


def settings(path: Path) -> VLLMSettings:
    return VLLMSettings(str(path), ROOM, dtype="float32", kv_cache_gib=0.25, max_num_seqs=32, lora=LORA)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    save_untrained(path, VOCABULARY, EOS, initializer_range=0.2)
    return path


@pytest.fixture
def runner(model_path: Path) -> Iterator[Runner]:
    runner = Runner(settings(model_path))
    yield runner
    runner.close()


def adapted(path: Path, seed: int) -> PreTrainedModel:
    """A large change by the adapter, so that an old one cannot pass for a new one."""
    model = load_causal_lm(str(path))
    add_adapter(model, LORA)
    torch.manual_seed(seed)
    with torch.no_grad():
        for _, parameter in adapter_tensors(model):
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def gap(runner: Runner, model: PreTrainedModel) -> float:
    prompts, policy = [*PROMPTS, LONG], PackedPolicy(model)
    answered = zip(prompts, runner.generate(prompts, Sampling(12)), strict=True)
    return max(
        abs(own - theirs)
        for prompt, each in answered
        for own, theirs in zip(trainer_logprobs(policy, prompt, each.token_ids, 1.0), each.logprobs, strict=True)
    )


class Losing:
    """An engine to which one of the buckets does not come."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def load_bucket(self, layout: Any, *handles: Any) -> None:
        if layout.number != 1:
            await self._engine.load_bucket(layout, *handles)


class Flipping(SharedMemory):
    """A transport that loses a sign."""

    def send(self, layout: Any, flat: Tensor) -> Any:
        handle = super().send(layout, flat)
        flat[3] *= -1
        return handle


@pytest.mark.long
def test_every_adapter_arrives_and_a_corrupted_one_does_not(runner: Runner, model_path: Path) -> None:
    """The long prompt has blocks in the prefix cache that the adapter before has computed."""
    models = [adapted(model_path, seed) for seed in (1, 2)]
    for version, model in enumerate(models):
        runner(sync(runner.engine, version, adapter_tensors(model)))
        assert gap(runner, model) < TOLERANCE
        assert gap(runner, models[1 - version]) > 0.1  # what the canary sees of the other adapter
    with pytest.raises(EngineLostError, match="a weight sync failed halfway"):
        with pytest.raises(EngineError, match=r"checksum mismatch in weight bucket 0 .*lora_"):
            runner(sync(runner.engine, 2, adapter_tensors(models[0]), sender=Flipping()))
        runner.generate(PROMPTS[:1], Sampling(1))


@pytest.mark.long
def test_a_bucket_that_is_lost_is_missed(runner: Runner, model_path: Path) -> None:
    """vLLM itself would compute with the rest of the adapter, without a word."""
    losing: Any = Losing(runner.engine)
    with pytest.raises(EngineError, match=r"weight bucket 1 .*lora_.* of version 0 is missing"):
        runner(sync(losing, 1, adapter_tensors(adapted(model_path, 1)), bucket_bytes=2**12))


@pytest.mark.long
def test_an_adapter_of_modules_that_vllm_does_not_have_is_refused(runner: Runner, model_path: Path) -> None:
    """vLLM itself would answer by the base, without a word."""
    tensors = adapter_tensors(adapted(model_path, 1))
    misnamed = [(name.replace("layers", "blocks"), each) for name, each in tensors]
    with pytest.raises(EngineError, match=r"vLLM did not load model.blocks.0.mlp.down_proj, .* and \d+ more"):
        runner(sync(runner.engine, 1, misnamed))


def layer(a: Tensor, b: Tensor, room: int = 4) -> Any:
    """A layer of vLLM's with one slot, whose buffers have room for a larger rank."""
    stacked_a, stacked_b = torch.zeros(1, 1, room, a.shape[1]), torch.zeros(1, 1, b.shape[0], room)
    stacked_a[0, 0, : a.shape[0]], stacked_b[0, 0, :, : b.shape[1]] = a, b
    return SimpleNamespace(
        tp_size=1, lora_a_stacked=(stacked_a,), lora_b_stacked=(stacked_b,), slice_lora_a=None, slice_lora_b=None
    )


def test_buffers_are_compared_with_what_arrived() -> None:
    a, b = torch.randn(2, 3), torch.randn(5, 2)
    lora = {"q": SimpleNamespace(lora_a=a, lora_b=b)}
    assert not_bound(lora, {"q": layer(a, b), "other": None}, 0) == []
    assert not_bound(lora, {"other": None}, 0) == ["q"]  # bound to nothing
    assert not_bound(lora, {"q": layer(a, b + 1e-6)}, 0) == ["q"]  # an old one
    left = layer(a, b)
    left.lora_a_stacked[0][0, 0, 3, 0] = 1.0
    assert not_bound(lora, {"q": left}, 0) == ["q"]  # rows of an earlier adapter


def test_a_part_without_adapter_has_empty_buffers() -> None:
    """Of q, k and v, which vLLM computes as one layer, k has none."""
    a, b = torch.randn(2, 3), torch.randn(5, 2)
    parts = [layer(a, b), layer(0 * a, 0 * b), layer(a, b)]
    packed = SimpleNamespace(
        tp_size=1,
        lora_a_stacked=[each.lora_a_stacked[0] for each in parts],
        lora_b_stacked=[each.lora_b_stacked[0] for each in parts],
        slice_lora_a=None,
        slice_lora_b=None,
    )
    lora = {"qkv": SimpleNamespace(lora_a=[a, None, a], lora_b=[b, None, b])}
    assert not_bound(lora, {"qkv": packed}, 0) == []
    packed.lora_b_stacked[1][0, 0, 0, 0] = 1.0
    assert not_bound(lora, {"qkv": packed}, 0) == ["qkv"]


def test_a_layer_in_more_parts_than_the_adapter_has() -> None:
    """Of gated delta nets, query, key and value are one weight, which vLLM computes as three parts, and z a fourth."""
    sizes, a, z = [2, 2, 3, 3], torch.randn(2, 3), torch.randn(2, 3)
    b, b_z = torch.randn(7, 2), torch.randn(3, 2)
    parts = [layer(a, each) for each in b.split(sizes[:3])]

    def divided(last: Any) -> Any:
        return SimpleNamespace(
            tp_size=1,
            output_sizes=sizes,
            lora_a_stacked=[each.lora_a_stacked[0] for each in (*parts, last)],
            lora_b_stacked=[each.lora_b_stacked[0] for each in (*parts, last)],
            slice_lora_a=None,
            slice_lora_b=None,
        )

    both = {"qkvz": SimpleNamespace(lora_a=[a, z], lora_b=[b, b_z])}
    assert not_bound(both, {"qkvz": divided(layer(z, b_z))}, 0) == []
    assert not_bound(both, {"qkvz": divided(layer(z, 0 * b_z))}, 0) == ["qkvz"]
    assert not_bound(both, {"qkvz": divided(layer(a, b_z))}, 0) == ["qkvz"]
    first = {"qkvz": SimpleNamespace(lora_a=[a, None], lora_b=[b, None])}
    assert not_bound(first, {"qkvz": divided(layer(0 * z, 0 * b_z))}, 0) == []
    assert not_bound(first, {"qkvz": divided(layer(z, b_z))}, 0) == ["qkvz"]
    whole = {"in": SimpleNamespace(lora_a=a, lora_b=torch.cat([b, b_z]))}  # one weight, as in Mamba2
    assert not_bound(whole, {"in": divided(layer(a, b_z))}, 0) == []
    assert not_bound(whole, {"in": divided(layer(a, -b_z))}, 0) == ["in"]
