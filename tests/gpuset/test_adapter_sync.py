"""Adapter sync into vLLM's own LoRA layers, on CPU tensors: every architecture of docs/training.md.

With the adapter a layer must compute what vLLM's layer with the merged weight does.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.gpuset.test_weight_reload import KINDS, UNUSABLE, Worker, one_process, untrained, vllm_config
from tests.verl.workers.test_parity import tiny_config
from verl.lora import Lora, adapted_layers, adapter_tensors, add_adapter
from verl.rollout.vllm_engine import VLLMSettings
from verl.transfer.bucket import plan
from verl.transfer.shared_memory import SharedMemory

pytestmark = pytest.mark.gpuset
__all__ = ["one_process"]  # a fixture of all tests here
LORA = Lora(rank=4, alpha=8.0, targets=("all-linear",))
BUCKET_BYTES = 8_000
WITHOUT = "starcoder2"  # vLLM has no adapters for it


@pytest.fixture(autouse=True)
def without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM pins an adapter's memory for the copy to the GPU."""
    from vllm.lora import lora_model, model_manager

    for module in (lora_model, model_manager):
        monkeypatch.setattr(module, "PIN_MEMORY", False)


class AdapterWorker(Worker):
    """A worker whose model has vLLM's LoRA layers."""

    def __init__(self, config: Any) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

        super().__init__(config)
        with set_current_vllm_config(config):
            manager = LRUCacheWorkerLoRAManager(config, self.device, self.model.embedding_modules)
            self.wrapped = manager.create_lora_manager(self.model, config)
        self.model_runner = SimpleNamespace(get_model=lambda: self.wrapped, lora_manager=manager)


def trained(folder: Path, seed: int) -> Any:
    """transformers' model with an adapter that changes every layer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    add_adapter(model, LORA)
    torch.manual_seed(seed)
    for _, parameter in adapter_tensors(model):
        parameter.data.normal_()
    return model


def send(worker: AdapterWorker, named: list[tuple[str, Tensor]]) -> list[str]:
    """An adapter sync, as the engine drives it; the modules that hold other tensors."""
    tensors = {name: each.detach() for name, each in named}
    layouts = plan(tensors.items(), torch.float32, BUCKET_BYTES)
    sender = SharedMemory()
    worker.begin_weights(pickle.dumps(layouts), True)
    for layout in layouts:
        flat = sender.buffer(layout)
        for piece, view in layout.unpack(flat):
            view.copy_(tensors[piece.names[0]])
        worker.load_bucket(pickle.dumps((layout, [sender.send(layout, flat)])))
    assert len(layouts) > 1
    return worker.end_adapter(LORA.rank, LORA.alpha)


def updates(worker: AdapterWorker) -> dict[str, Tensor]:
    """What vLLM's LoRA layers add to each of its weights."""
    found = {}
    for name, layer in worker.model_runner.lora_manager._adapter_manager.modules.items():
        if not isinstance(layer.lora_a_stacked, tuple):  # of the output head, which has no adapter here
            continue
        factors = zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True)
        found[f"{name}.weight"] = torch.cat([b[0, 0] @ a[0, 0] for a, b in factors])
    return found


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in (*UNUSABLE, WITHOUT)])
def test_every_adapter_arrives_as_its_merged_weights_would(kind: str, tmp_path: Path) -> None:
    weights = untrained(tiny_config(kind, tie_word_embeddings=True, **KINDS[kind]), tmp_path)
    settings = VLLMSettings(model_path=str(tmp_path), max_model_len=64, dtype="float32", lora=LORA)
    models = [trained(tmp_path, seed) for seed in (1, 2)]  # before vLLM wraps a class of transformers'
    worker, plain = AdapterWorker(vllm_config(tmp_path, settings)), Worker(vllm_config(tmp_path))
    for model in models:  # the second one replaces the first
        assert send(worker, [*adapter_tensors(model)]) == []
        merged = {name: torch.zeros_like(weight, dtype=torch.float32) for name, weight in weights.items()}
        for name, layer in adapted_layers(model).items():
            factors = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
            merged[f"{name}.weight"] = (LORA.alpha / LORA.rank * factors).detach()
        plain.load(merged)
        found = updates(worker)
        assert len(found) >= 8  # four of each of two layers
        for name, update in found.items():
            torch.testing.assert_close(update.bfloat16(), plain.parameters()[name], rtol=0.01, atol=0.02)


def test_modules_that_vllm_does_not_have_are_reported(tmp_path: Path) -> None:
    untrained(tiny_config("qwen2"), tmp_path)
    settings = VLLMSettings(model_path=str(tmp_path), max_model_len=64, dtype="float32", lora=LORA)
    named = [*adapter_tensors(trained(tmp_path, 1))]
    worker = AdapterWorker(vllm_config(tmp_path, settings))
    odd = [(name.replace("layers.1", "layers.7"), each) for name, each in named]
    left_out = send(worker, odd)
    assert left_out and all("layers.7" in name for name in left_out)
    assert send(worker, named) == []
    buffers = worker.model_runner.lora_manager._adapter_manager.modules["model.layers.0.mlp.down_proj"]
    assert buffers.lora_b_stacked[0].count_nonzero()


def test_vllm_takes_no_adapters_of_starcoder(tmp_path: Path) -> None:
    from vllm.model_executor.models.interfaces import supports_lora

    untrained(tiny_config(WITHOUT, **KINDS[WITHOUT]), tmp_path)
    assert not supports_lora(Worker(vllm_config(tmp_path)).model)
