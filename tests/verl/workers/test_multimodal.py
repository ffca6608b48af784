"""Multimodal checkpoints trained on text: the whole model is loaded and exported, its towers stay as they are."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoTokenizer

from tests.support.multimodal import MULTIMODAL, multimodal_config
from tests.support.tiny import MINI
from tests.support.weight_sync import sync
from tests.verl.batch.test_packing import VOCABULARY, random_samples
from tests.verl.rollout.test_hf_engine import generate, trainer_logprobs
from verl.batch.packing import make_units, pack
from verl.batch.samples import batch_of
from verl.build.engines import max_positions
from verl.config.schema import ModelConfig
from verl.lora import Lora, check_targets, target_modules
from verl.pretrained import check_weights, class_of, read_causal_lm
from verl.rollout.engine import Sampling
from verl.rollout.hf_engine import HFEngine
from verl.workers.export import start_export
from verl.workers.fsdp_engine import FSDPEngine
from verl.workers.model import PackedCritic, PackedPolicy, decoder_layers, hf_named_parameters, load_causal_lm, towers
from verl.workers.optim import OptimizerSettings
from verl.workers.parity import check_packs, packing_gap
from verl.workers.policy_worker import PolicyWorker, sft_loss

KINDS = [*MULTIMODAL]
LR = 0.01
PROCESSOR = '{"image_processor_type": "of this model"}'


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    config = multimodal_config(request.param, VOCABULARY)
    torch.manual_seed(0)
    path = tmp_path / request.param
    class_of(config).from_config(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(MINI / "tokenizer").save_pretrained(path)
    (path / "preprocessor_config.json").write_text(PROCESSOR)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_packs_of_text_equal_the_whole_models_own_forward(kind: str) -> None:
    assert packing_gap(multimodal_config(kind, VOCABULARY)) < 1e-5


def test_a_whole_model_is_loaded_and_its_towers_are_frozen(folder: Path) -> None:
    check_packs(str(folder), 512)
    check_weights(str(folder))
    policy = PackedPolicy(load_causal_lm(str(folder)))
    assert type(policy.model).__name__ == json.loads((folder / "config.json").read_text())["architectures"][0]
    named = dict(policy.model.named_parameters(remove_duplicate=False))
    sent = dict(hf_named_parameters(policy))
    assert {name for name, each in named.items() if each.requires_grad} == sent.keys()
    frozen = named.keys() - sent.keys()
    assert {"vision" in name or "visual" in name or "projector" in name or "connector" in name for name in frozen} == {
        True
    }
    in_towers = {id(each) for tower in towers(policy) for each in tower.parameters()}
    assert in_towers == {id(named[name]) for name in frozen}
    assert max_positions(ModelConfig(path=str(folder))) == 1024
    critic = PackedCritic(load_causal_lm(str(folder)))
    assert critic.value_head.weight.shape == (1, 64) and towers(critic) == []


def test_an_adapter_is_of_the_text_alone(folder: Path) -> None:
    lora = Lora(rank=2, alpha=4.0, targets=("all-linear",))
    check_targets(lora, str(folder))
    model = load_causal_lm(str(folder))
    own = {name for name, _ in model.named_modules() if model.get_submodule(name) in {*model.get_decoder().modules()}}
    chosen = target_modules(model, lora)
    assert {*chosen} < own and any(name.endswith("q_proj") for name in chosen)


def test_an_export_is_the_same_folder_with_new_text_weights(folder: Path, tmp_path: Path, group: None) -> None:
    """After an update by FSDP, of whose weights a sync sends those that text passes."""
    policy = PackedPolicy(load_causal_lm(str(folder)))
    batch = batch_of(random_samples(1))
    packed = pack(make_units(batch, share_prefix=True, max_tokens=1000), batch)
    object.__setattr__(packed, "loss_weights", torch.ones(len(packed.target)))
    layers = [*decoder_layers(policy), *towers(policy)]
    engine = FSDPEngine(policy, layers, init_device_mesh("cpu", (1,)), OptimizerSettings(lr=LR, weight_decay=0.0))
    engine.update([packed], sft_loss)
    worker = PolicyWorker(engine, 1.0)
    layouts = worker.connect(None, torch.float32, 1 << 20)
    assert {name for each in layouts for part in each.slices for name in part.names} == dict(
        hf_named_parameters(policy)
    ).keys()
    out = tmp_path / "out"
    start_export(engine, out, str(folder), dtype=torch.float32).write()
    before, after = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    untouched = before.keys() - changed
    assert changed and untouched and not any("vis" in name for name in changed)
    assert all("vis" in name or "projector" in name or "connector" in name for name in untouched)
    first, second = (json.loads((each / "config.json").read_text()) for each in (folder, out))
    assert (first["model_type"], first["architectures"]) == (second["model_type"], second["architectures"])
    assert (out / "preprocessor_config.json").read_text() == PROCESSOR
    reloaded = PackedPolicy(load_causal_lm(str(out)))
    with torch.no_grad():
        torch.testing.assert_close(
            reloaded(packed, 1.0, False).logprobs, policy(packed, 1.0, False).logprobs, rtol=0, atol=1e-5
        )


def test_the_transformers_engine_takes_the_text_weights(folder: Path) -> None:
    engine = HFEngine(read_causal_lm(str(folder), torch.float32))
    policy = PackedPolicy(load_causal_lm(str(folder)))
    torch.manual_seed(1)
    with torch.no_grad():
        for _, each in hf_named_parameters(policy):
            each += 0.05 * torch.randn_like(each)
    asyncio.run(sync(engine, 1, hf_named_parameters(policy)))
    prompts = [[5, 6, 7], [1], [*range(9, 30)]]
    for prompt, each in zip(prompts, generate(engine, prompts, *[Sampling(8)] * 3), strict=True):
        wanted = trainer_logprobs(policy, prompt, each.token_ids, 1.0)
        assert list(each.logprobs) == pytest.approx(wanted, abs=1e-4)
