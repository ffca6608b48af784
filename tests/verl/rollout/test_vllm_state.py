"""Layers with state in real vLLM: its log-probs are the trainer's, before and after new weights of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.conftest import need_vllm
from tests.support.stateful import engine_config
from tests.support.weight_sync import sync
from tests.verl.rollout.test_vllm_engine import VOCABULARY, Runner, mean_gap
from verl.lora import Lora, adapter_tensors, add_adapter
from verl.rollout.vllm_engine import VLLMSettings
from verl.workers.model import PackedPolicy, load_causal_lm

need_vllm()
pytestmark = pytest.mark.long  # an engine takes 10 s to start

BOUND = 1e-4  # nats, in float32


def saved(kind: str, folder: Path) -> PackedPolicy:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(engine_config(kind, VOCABULARY)).save_pretrained(folder)
    return PackedPolicy(load_causal_lm(str(folder)))


@pytest.fixture
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Runner, PackedPolicy]]:
    policy = saved(request.param, tmp_path)
    runner = Runner(VLLMSettings(str(tmp_path), 512, dtype="float32", kv_cache_gib=0.25, max_num_seqs=32))
    yield runner, policy
    runner.close()


@pytest.mark.parametrize("engine", ["granitemoehybrid", "falcon_h1", "lfm2"], indirect=True)
def test_the_engine_computes_what_the_trainer_does(engine: tuple[Runner, PackedPolicy]) -> None:
    """As loaded; after a reload of the same weights; and after each kind of weight alone has changed, which the engine
    with the weights before does not hide."""
    runner, policy = engine
    assert mean_gap(runner, policy, 1.0, 0) < BOUND
    runner.sync(1, policy)
    assert mean_gap(runner, policy, 1.0, 1) < BOUND
    named = dict(policy.model.named_parameters())
    torch.manual_seed(1)
    version = 1
    for kind in ("A_log", "dt_bias", "conv1d", ".conv.conv.", "_proj", "embed"):
        changed = [each for name, each in named.items() if kind in name]
        if not changed:
            continue
        with torch.no_grad():
            for each in changed:
                each += 0.5 * torch.randn_like(each)
        assert mean_gap(runner, policy, 1.0, version) > 1e-2, kind
        version += 1
        runner.sync(version, policy)
        assert mean_gap(runner, policy, 1.0, version) < 2 * BOUND, kind
    assert version >= 4


@pytest.mark.parametrize("engine", ["nemotron_h"], indirect=True)
def test_an_engine_takes_all_weights(engine: tuple[Runner, PackedPolicy]) -> None:
    runner, policy = engine
    assert mean_gap(runner, policy, 1.0, 0) < BOUND
    runner.sync(1, policy)
    assert mean_gap(runner, policy, 1.0, 1) < BOUND
    with torch.no_grad():
        for each in policy.model.parameters():
            each += 0.05 * torch.randn_like(each)
    assert mean_gap(runner, policy, 1.0, 1) > 1e-2
    runner.sync(2, policy)
    assert mean_gap(runner, policy, 1.0, 2) < BOUND


@pytest.mark.parametrize("kind", ["granitemoehybrid"])
def test_the_adapter_of_each_layer_arrives(kind: str, tmp_path: Path) -> None:
    """Each kind of layer alone; vLLM computes the first projection of Mamba2 as five parts."""
    lora, policy = Lora(rank=4, alpha=8.0, targets=("all-linear",)), saved(kind, tmp_path)
    add_adapter(policy.model, lora)
    tensors = dict(adapter_tensors(policy.model))
    kinds = sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors})
    runner = Runner(VLLMSettings(str(tmp_path), 512, dtype="float32", kv_cache_gib=0.25, max_num_seqs=32, lora=lora))
    try:
        torch.manual_seed(1)
        for version, each in enumerate(kinds):
            with torch.no_grad():
                for name, tensor in tensors.items():
                    if f".{each}." in name:
                        tensor.add_(0.2 * torch.randn_like(tensor))
            assert mean_gap(runner, policy, 1.0, version) > 1e-3, each
            runner(sync(runner.engine, version + 1, tensors.items()))
            assert mean_gap(runner, policy, 1.0, version + 1) < BOUND, each
    finally:
        runner.close()
    assert kinds == ["in_proj", "input_linear", "k_proj", "o_proj", "out_proj", "output_linear", "q_proj", "v_proj"]
