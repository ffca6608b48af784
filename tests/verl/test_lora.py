"""Adapters: the base stays as it is, the tensors are peft's, and engines compute what the trainer does."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.support.every import every
from tests.support.ranks import in_ranks
from tests.support.service import free_port
from tests.support.stateful import DENSE
from tests.support.tiny import MINI, save_untrained
from tests.support.weight_sync import sync
from tests.verl.batch.test_packing import random_samples
from tests.verl.rollout.test_hf_engine import trainer_logprobs
from tests.verl.workers.conftest import group  # noqa: F401  a fixture
from tests.verl.workers.test_fused import FORMULAS
from toolrl.check.preflight.local_group import LocalGroup
from verl.algorithms.names import Aggregation
from verl.batch.experience import with_loss_weights
from verl.batch.packing import Shard, assign, make_units, pack
from verl.batch.samples import batch_of
from verl.build.ranks import check_adapter
from verl.config.commands import SFT, TRAIN, Command
from verl.config.load import load_config
from verl.config.schema import LoraConfig
from verl.errors import ConfigError, EngineError
from verl.lora import (
    Lora,
    adapter_tensors,
    add_adapter,
    base_alone,
    check_parts,
    lora_of,
    save_adapter,
    target_modules,
)
from verl.rollout.engine import Sampling
from verl.rollout.hf_engine import HFEngine, load_hf_engine
from verl.single_controller.group import WorkerContext
from verl.trainer.policy import PackSettings, Policy
from verl.trainer.weight_sync import StaleEngineError, WeightSync
from verl.transfer.bucket import NUM_SLOTS
from verl.transfer.shared_memory import ByValue
from verl.workers.checkpoint_reader import TensorReader
from verl.workers.export import start_adapter_export, start_export
from verl.workers.fsdp_engine import FSDPEngine
from verl.workers.fused import fuse
from verl.workers.model import PackedPolicy, decoder_layers, load_causal_lm
from verl.workers.optim import OptimizerSettings
from verl.workers.policy_worker import PolicyWorker, sft_loss
from verl.workers.rank import RankSpec, build_rank

VOCABULARY = 97
LORA = Lora(rank=4, alpha=8.0, targets=("all-linear",))
PROMPTS = [[5, 6, 7], list(range(1, 40))]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    save_untrained(path, VOCABULARY, 3, initializer_range=0.2)
    return path


def adapted(path: Path, lora: Lora = LORA, seed: int = 0) -> PreTrainedModel:
    model = load_causal_lm(str(path))
    add_adapter(model, lora, seed)
    return model


def shake(model: torch.nn.Module, seed: int, size: float = 0.3) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for _, parameter in adapter_tensors(model):
            parameter.add_(size * torch.randn_like(parameter))


def engine_of(model: PreTrainedModel) -> FSDPEngine:
    module = PackedPolicy(model)
    mesh = init_device_mesh("cpu", (1,))
    return FSDPEngine(module, decoder_layers(module), mesh, OptimizerSettings(lr=1e-2))


def shard() -> Shard:
    batch = with_loss_weights(batch_of(random_samples(3)), Aggregation.TOKEN_MEAN)
    return Shard(batch, [make_units(batch, True, 200)])


def full_weights(engine: FSDPEngine) -> dict[str, Tensor]:
    named = engine.module.named_parameters()
    return {name: full.clone() for name, full in engine.export_weights(named)}


def test_steps_change_the_adapter_alone(model_path: Path, group: None) -> None:  # noqa: F811
    engine = engine_of(adapted(model_path))
    before = full_weights(engine)
    losses = [engine.update(shard(), sft_loss).loss for _ in range(3)]
    changed = {name for name, full in full_weights(engine).items() if not torch.equal(full, before[name])}
    assert changed == {name for name in before if ".lora_" in name} and losses[2] < losses[0]
    assert len(engine._optimizer.state) == len(changed) == 28  # type: ignore[union-attr]
    assert engine.trained_bytes == 4 * sum(before[name].numel() for name in changed) < engine.param_bytes


def test_the_reference_is_the_base_to_the_last_bit(model_path: Path, group: None) -> None:  # noqa: F811
    model = adapted(model_path)
    shake(model, 1)
    engine = engine_of(model)
    policy, reference = PolicyWorker(engine, 1.0), PolicyWorker(engine, 1.0, without_adapter=True)
    alone = PolicyWorker(engine_of(load_causal_lm(str(model_path))), 1.0)
    moved, expected = policy.score(shard()), alone.score(shard())
    assert (reference.score(shard()) == expected).all()
    assert abs(moved - expected).max() > 0.5 and (policy.score(shard()) == moved).all()


def test_training_goes_on_after_a_checkpoint_bit_for_bit(
    model_path: Path,
    tmp_path: Path,
    group: None,  # noqa: F811
) -> None:
    straight, saved, resumed = (engine_of(adapted(model_path, seed=seed)) for seed in (0, 0, 1))
    for _ in range(4):
        straight.update(shard(), sft_loss)
    for _ in range(2):
        saved.update(shard(), sft_loss)
    saved.save(tmp_path / "actor")
    resumed.load(tmp_path / "actor")
    for _ in range(2):
        resumed.update(shard(), sft_loss)
    expected, found = full_weights(straight), full_weights(resumed)
    assert every(torch.equal(full, found[name]) for name, full in expected.items())
    written = [
        name for name in TensorReader(tmp_path / "actor").read_metadata().state_dict_metadata if "model." in name
    ]
    assert every(".lora_" in name for name in written)
    assert len([name for name in written if name.startswith("module.")]) == 28


def test_exports_compute_what_the_trainer_does(model_path: Path, tmp_path: Path, group: None) -> None:  # noqa: F811
    model = adapted(model_path)
    shake(model, 1)
    engine, ids = engine_of(model), torch.tensor([PROMPTS[1]])
    start_export(engine, tmp_path / "hf", str(model_path), str(MINI / "tokenizer"), torch.float32).write()
    start_adapter_export(engine, tmp_path / "adapter", LORA, str(model_path)).write()
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    with torch.no_grad():
        own = base(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)(ids).logits
        peft = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(ids).logits
    torch.testing.assert_close(merged, peft, atol=1e-4, rtol=1e-4)
    again = PackedPolicy(adapted(model_path, started(tmp_path)))
    expected = trainer_logprobs(again, PROMPTS[1][:-1], PROMPTS[1][-1:], 1.0)
    assert float(peft[0, -2].log_softmax(-1)[PROMPTS[1][-1]]) == pytest.approx(expected[0], abs=1e-4)
    assert float((own - peft).abs().max()) > 1.0
    targets = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["target_modules"]
    assert sorted(targets) == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


def started(folder: Path) -> Lora:
    """The settings of a run that starts from the adapter in the folder."""
    lora = lora_of(LoraConfig(path=str(folder / "adapter")))
    assert lora is not None and (lora.rank, lora.alpha) == (LORA.rank, LORA.alpha)
    return lora


def gap(engine: Any, policy: PackedPolicy) -> float:
    """The largest difference between the log-probs of the engine's responses and the trainer's, in nats."""

    async def answers() -> list[Any]:
        return [await engine.generate(prompt, Sampling(12, seed=number)) for number, prompt in enumerate(PROMPTS)]

    answered = zip(PROMPTS, asyncio.run(answers()), strict=True)
    return max(
        abs(own - theirs)
        for prompt, (each,) in answered
        for own, theirs in zip(trainer_logprobs(policy, prompt, each.token_ids, 1.0), each.logprobs, strict=True)
    )


def test_the_transformers_engine_follows_the_adapter(model_path: Path) -> None:
    model = adapted(model_path)
    policy = PackedPolicy(model)
    engine = load_hf_engine(str(model_path), torch.float32, "cpu", 8, lora=LORA)
    for version in (1, 2):
        shake(model, version)
        assert gap(engine, policy) > 0.1  # the old adapter is not the new one
        asyncio.run(sync(engine, version, adapter_tensors(model)))
        assert gap(engine, policy) < 1e-4
    whole = load_hf_engine(str(model_path), torch.float32, "cpu", 8)
    with pytest.raises(EngineError, match="lacks 27 weights"):
        asyncio.run(sync(whole, 1, adapter_tensors(model)))


class Flipping(ByValue):
    """A transport that loses a sign."""

    def send(self, layout: Any, flat: Tensor) -> Any:
        handle = super().send(layout, flat)
        flat[3] *= -1
        return handle


def test_a_corrupted_adapter_is_refused(model_path: Path) -> None:
    model = adapted(model_path)
    shake(model, 1)
    engine = load_hf_engine(str(model_path), torch.float32, "cpu", 8, lora=LORA)
    with pytest.raises(EngineError, match=r"checksum mismatch in weight bucket 0 .*lora_"):
        asyncio.run(sync(engine, 1, adapter_tensors(model), sender=Flipping()))


@pytest.mark.parametrize(
    ("dtype", "size", "least", "most"), [("float32", 1e-2, 0.9999, 1.0001), ("bfloat16", 1e-4, 0.0, 0.1)]
)
def test_a_merged_sync_measures_what_rounding_leaves(
    dtype: str,
    size: float,
    least: float,
    most: float,
    tmp_path: Path,
    model_path: Path,
    group: None,  # noqa: F811
) -> None:
    model = adapted(model_path)
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            parameter.data = parameter.data.bfloat16().float()  # as most models are stored
    shake(model, 1, size)
    base = AutoModelForCausalLM.from_pretrained(model_path)
    worker = PolicyWorker(engine_of(model), 1.0)
    layouts = worker.connect(ByValue, getattr(torch, dtype), 2**14)
    names = {name for layout in layouts for each in layout.slices for name in each.names}
    assert names == {name for name, _ in base.named_parameters(remove_duplicate=False)} and len(layouts) > NUM_SLOTS
    sent = {}
    for layout in layouts:
        handle: Any = worker.send_bucket(layout.number, 0)
        sent |= {name: view.clone() for name, view in layout.named(handle.flat)}
    layer: Any = model.model.layers[1].self_attn.k_proj
    weights = (layer.base_layer.weight, layer.lora_B["default"].weight, layer.lora_A["default"].weight)
    (_, own), (_, left), (_, right) = worker.engine.export_weights(zip("WBA", weights, strict=True))
    expected = (own + 2.0 * left @ right).to(getattr(torch, dtype))  # alpha 8, rank 4
    torch.testing.assert_close(sent["model.layers.1.self_attn.k_proj.weight"], expected, atol=1e-7, rtol=1e-6)
    share = worker.end_weight_sync()
    assert share is not None and least <= share <= most
    assert worker.end_weight_sync() is None


def test_an_adapter_sync_sends_nothing_else(model_path: Path, group: None) -> None:  # noqa: F811
    model = adapted(model_path)
    worker = PolicyWorker(engine_of(model), 1.0, sends_adapter=True)
    layouts = worker.connect(ByValue, torch.float32, 2**30)
    assert [name for each in layouts[0].slices for name in each.names] == [name for name, _ in adapter_tensors(model)]
    worker.send_bucket(0, 0)
    assert worker.end_weight_sync() is None


class Keeping(HFEngine):
    """An engine that keeps the adapter it has."""

    async def load_bucket(self, layout: Any, *handles: Any) -> None:
        self._receiver.receive(layout, handles)


@pytest.mark.parametrize("kind", [HFEngine, Keeping])
def test_the_canary_notices_an_old_adapter(kind: type[HFEngine], model_path: Path, group: None) -> None:  # noqa: F811
    model = adapted(model_path)
    policy = Policy(LocalGroup(PolicyWorker(engine_of(model), 1.0, sends_adapter=True)), PackSettings())
    engine = load_hf_engine(str(model_path), torch.float32, "cpu", 8, lora=LORA)
    engine.__class__ = kind
    layouts = policy.connect([ByValue], torch.float32, 2**30)
    sampling, probes = Sampling(8, seed=0), [tuple(each) for each in PROMPTS]
    made = WeightSync(policy=policy, engine=engine, layouts=layouts, probes=probes, sampling=sampling, tolerance=1e-3)
    assert asyncio.run(made.sync(0)) < 1e-4  # B = 0, as in the engine
    shake(model, 1)
    if kind is HFEngine:
        assert asyncio.run(made.sync(1)) < 1e-4
        return
    with pytest.raises(StaleEngineError, match="stale weights or different numerics"):
        asyncio.run(made.sync(1))


def experts() -> PreTrainedModel:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 1}
    with torch.device("meta"):
        return Qwen3MoeForCausalLM(
            Qwen3MoeConfig(vocab_size=50, num_experts=4, num_attention_heads=2, num_key_value_heads=1, **sizes)
        )


@pytest.mark.parametrize(
    ("targets", "problem"),
    [
        (["qproj"], "no linear layer is named qproj; there are down_proj, gate_proj, k_proj, o_proj"),
        (["lm_head"], "no linear layer is named lm_head"),
        (["_proj"], "no linear layer is named _proj"),
    ],
)
def test_a_target_that_names_no_layer_is_one_error(model_path: Path, targets: list[str], problem: str) -> None:
    model = load_causal_lm(str(model_path))
    with pytest.raises(ConfigError, match=problem):
        target_modules(model, replace(LORA, targets=tuple(targets)))


@pytest.mark.parametrize("target", ["all-linear", "experts", "gate_up_proj", "down_proj"])
def test_experts_get_no_adapter(target: str) -> None:
    with pytest.raises(ConfigError, match=rf"lora.targets: {target} is in experts .* k_proj, o_proj, q_proj, v_proj$"):
        target_modules(experts(), replace(LORA, targets=(target,)))
    assert len(target_modules(experts(), replace(LORA, targets=("q_proj", "v_proj")))) == 2


def test_targets_by_name_or_by_layer(model_path: Path) -> None:
    model = load_causal_lm(str(model_path))
    assert len(target_modules(model, LORA)) == 14
    assert target_modules(model, replace(LORA, targets=("layers.1.self_attn.q_proj", "o_proj"))) == [
        "model.layers.0.self_attn.o_proj",
        "model.layers.1.self_attn.o_proj",
        "model.layers.1.self_attn.q_proj",
    ]


def test_every_rank_starts_from_the_same_adapter_and_leaves_the_random_state(model_path: Path) -> None:
    before = torch.get_rng_state()
    one, other, third = (adapted(model_path, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), before)
    pairs = list(zip(adapter_tensors(one), adapter_tensors(other), adapter_tensors(third), strict=True))
    assert every(torch.equal(left, right) for (_, left), (_, right), _ in pairs)
    assert not every(torch.equal(left, right) for (_, left), _, (_, right) in pairs)


def test_settings_of_an_adapter(tmp_path: Path, model_path: Path) -> None:
    assert lora_of(LoraConfig()) is lora_of(LoraConfig(rank=0)) is None
    assert lora_of(LoraConfig(rank=8)) == Lora(8, 32.0, ("all-linear",))
    assert lora_of(LoraConfig(rank=8, alpha=4, targets=["q_proj"], sync="merged")) == Lora(
        8, 4.0, ("q_proj",), None, True
    )
    model = adapted(model_path, replace(LORA, targets=("q_proj",)))
    save_adapter(replace(LORA, targets=("q_proj",)), dict(adapter_tensors(model)), tmp_path, str(model_path))
    path = str(tmp_path)
    assert lora_of(LoraConfig(path=path)) == Lora(4, 8.0, ("q_proj",), path)
    with pytest.raises(ConfigError, match=r"lora.rank=8, but the adapter in .* has 4"):
        lora_of(LoraConfig(path=path, rank=8))
    with pytest.raises(ConfigError, match=r"lora.path: no adapter of peft can be read"):
        lora_of(LoraConfig(path=str(model_path)))
    with pytest.raises(ConfigError, match=r"lora.path: the adapter in .* is of another model: .*k_proj"):
        adapted(model_path, replace(LORA, targets=("q_proj", "k_proj"), path=path))
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**settings, "use_dora": True}))
    with pytest.raises(ConfigError, match="has use_dora, which is not supported"):
        lora_of(LoraConfig(path=path))


def test_base_alone_restores_the_adapter_after_an_error(model_path: Path) -> None:
    model = adapted(model_path)
    shake(model, 1)
    hidden, layer = torch.randn(2, 64), model.get_submodule("model.layers.0.self_attn.q_proj")
    before = layer(hidden)
    with pytest.raises(ZeroDivisionError), base_alone(model):
        1 / 0  # noqa: B018
    assert torch.equal(layer(hidden), before)


@pytest.mark.parametrize(
    ("command", "written", "lr"),
    [
        (TRAIN, ["lora.rank=8"], 1e-5),
        (TRAIN, ["lora.rank=0"], 1e-6),
        (TRAIN, ["lora.rank=8", "actor.optim.lr=3e-6"], 3e-6),
        (TRAIN, ["recipe=embedded", "lora.rank=8"], 4e-3),
        (SFT, ["lora.rank=8"], 1e-4),
        (SFT, [], 1e-5),
    ],
)
def test_an_adapter_learns_ten_times_as_fast_unless_the_rate_is_set(
    command: Command, written: list[str], lr: float, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        config = load_config(written, command)
    assert config.actor.optim.lr == lr
    set_here = config.lora.enabled and "optim" not in str(written)
    assert (f"actor.optim.lr={lr}, which is 10 times" in caplog.text) == set_here


@pytest.mark.parametrize(("name", "models"), [("grpo", ["actor"]), ("ppo", ["actor", "critic"])])
def test_the_rate_of_a_critic_is_logged_where_there_is_one(
    name: str, models: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        config = load_config([f"algorithm.name={name}", "lora.rank=8"])
    assert [record.getMessage().partition(".")[0] for record in caplog.records] == models
    assert config.critic.optim.lr == 1e-4


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        (["lora.alpha=8"], "lora.alpha=8 has no effect: all weights are trained"),
        (["lora.sync=merged"], "lora.sync=merged has no effect: all weights are trained"),
        (["lora.rank=8", "ref.offload_params=true"], "the reference is the policy's frozen base"),
        (["lora.rank=-1"], "lora.rank must be 0 or more"),
        (["lora.rank=8", "lora.targets=[]"], "lora.targets must be names of layers"),
        (["lora.rank=8", "lora.sync=both"], "lora.sync must be adapter or merged"),
    ],
)
def test_settings_without_effect_or_sense_are_refused(written: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_config(written)


def test_what_the_model_or_vllm_cannot_have_is_refused_before_the_start(
    model_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = f"model.path={model_path}"
    with pytest.raises(ConfigError, match=r"lora.rank=513: vLLM has adapters of at most rank 512; set lora.sync"):
        check_adapter(load_config([model, "lora.rank=513"]))
    with pytest.raises(ConfigError, match=r"no linear layer is named wqkv"):
        check_adapter(load_config([model, "lora.rank=8", "lora.targets=[wqkv]"]))
    check_adapter(load_config([model]))
    check_adapter(load_config([model, "lora.rank=513", "rollout.name=hf"]))
    assert "merged_share" not in caplog.text
    check_adapter(load_config([model, "lora.rank=513", "lora.sync=merged"]))
    assert "lora.sync=merged: weights in bfloat16 round small updates" in caplog.text


def test_a_part_that_vllm_cannot_place_is_refused_before_the_start(tmp_path: Path) -> None:
    """By the names of layers: of one target, in one layer, or in a file."""
    layers = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "linear_attention", "full_attention"]}
    CONFIG_MAPPING["qwen3_5_text"](**{**DENSE["qwen3_5_text"], **layers}).save_pretrained(tmp_path)

    def check(*written: str) -> None:
        check_adapter(load_config([f"model.path={tmp_path}", "lora.rank=8", "rollout.name=vllm", *written]))

    second, both = "lora.targets=[in_proj_z]", "lora.targets=[in_proj_z,in_proj_qkv]"
    with pytest.raises(ConfigError, match=r"lora.targets: .* adapter of model.layers.0.linear_attn.in_proj_z without"):
        check(second)
    with pytest.raises(ConfigError, match=r"without one of in_proj_qkv beside it; add in_proj_qkv, or set lora.sync="):
        check("lora.targets=[in_proj_z,layers.1.linear_attn.in_proj_qkv]")
    for accepted in ([both], ["lora.targets=[in_proj_qkv]"], [second, "lora.sync=merged"], [second, "rollout.name=hf"]):
        check(*accepted)
    check()
    check_parts(["in_proj_z", "in_proj_qkv"], "", "")
    with pytest.raises(ConfigError, match=r"run: vLLM has no adapter of in_proj_z without"):
        check_parts(["in_proj_z", "q_proj"], "run", "")


def train_rank(rank: int, world: int, folder: Path, model_path: Path) -> None:
    """Two updates of an adapter on this rank's packs; with several ranks layers use kernels by their formulas."""
    model = load_causal_lm(str(model_path), torch.float64)
    assert world == 1 or fuse(model, FORMULAS).layers == 2
    add_adapter(model, LORA)
    module = PackedPolicy(model)
    settings = OptimizerSettings(lr=1e-2)
    engine = FSDPEngine(module, decoder_layers(module), init_device_mesh("cpu", (world,)), settings, torch.float64)
    batch = with_loss_weights(batch_of(random_samples(5, (4, 1, 3, 2))), Aggregation.TOKEN_MEAN)
    dealt = assign(make_units(batch, True, 60), 60, num_ranks=world)
    packs = [pack(units, batch) for units in dealt[rank::world]]
    results = [engine.update(packs, sft_loss) for _ in range(2)]
    weights = full_weights(engine)
    if rank == 0:
        torch.save((results[1].loss, results[1].grad_norm, weights), folder / f"{world}.pt")


@pytest.mark.long
def test_two_ranks_with_kernels_train_the_adapter_of_one_without(model_path: Path, tmp_path: Path) -> None:
    for world in (1, 2):
        in_ranks(world, train_rank, tmp_path, model_path)
    (loss, norm, weights), (other_loss, other_norm, others) = (torch.load(tmp_path / f"{world}.pt") for world in (1, 2))
    assert (other_loss, other_norm) == pytest.approx((loss, norm), rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(others[name], weight, atol=1e-5, rtol=1e-5)


@pytest.fixture
def context() -> Iterator[WorkerContext]:
    """Of a rank that makes its own process group."""
    port = free_port()
    yield WorkerContext(0, 1, port=port)
    gc.collect()
    dist.destroy_process_group()


def test_a_critic_trains_its_adapter_and_its_head(model_path: Path, context: WorkerContext) -> None:
    settings = OptimizerSettings(lr=1e-2)
    path = str(model_path)
    spec = RankSpec(path, torch.bfloat16, 1.0, settings, LORA, critic_path=path, critic_optimizer=settings)
    rank = build_rank(replace(spec, with_reference=True), context)
    assert rank.critic is not None and rank.reference is not None and rank.reference.engine is rank.policy.engine
    engine = rank.critic.engine
    before = full_weights(engine)
    batch = batch_of(random_samples(3))
    ones = np.ones(int(batch.num_trained.sum()), dtype=np.float32)
    batch = with_loss_weights(replace(batch, values=0 * ones, returns=ones), Aggregation.TOKEN_MEAN)
    losses = [rank.critic.update(Shard(batch, [make_units(batch, True, 200)])).loss for _ in range(3)]
    after = full_weights(engine)
    changed = {name for name, full in after.items() if not torch.equal(full, before[name])}
    assert changed == {name for name in before if ".lora_" in name} | {"value_head.weight"}
    assert losses[2] < losses[0]
    assert {full.dtype for name, full in after.items() if name in changed} == {torch.float32}
    assert {full.dtype for name, full in after.items() if name not in changed} == {torch.bfloat16}
