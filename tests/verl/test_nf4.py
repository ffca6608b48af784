"""A base in four bits is a model of its own: ranks compute the weights of the folder that they load."""

from __future__ import annotations

import gc
import resource
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.every import every
from tests.support.service import free_port
from tests.support.tiny import MINI, save_untrained
from tests.verl.test_lora import LORA, shard
from verl.build.base import base_contents, rounded_base
from verl.build.ranks import check_adapter
from verl.config.load import load_config
from verl.config.schema import Config
from verl.errors import ConfigError, DataError
from verl.host.digests import folder_digests
from verl.lora import adapter_tensors, linear_layers
from verl.nf4 import Nf4Linear, hold_in_four_bits, nf4_layers, rounded
from verl.single_controller.group import WorkerContext
from verl.workers.checkpoint_reader import TensorReader
from verl.workers.export import start_export
from verl.workers.memory import RankSettings, resident, shape_of
from verl.workers.model import PackedPolicy, load_causal_lm
from verl.workers.optim import OptimizerSettings
from verl.workers.policy_worker import sft_loss
from verl.workers.rank import RankSpec, TrainingRank, build_rank

VOCABULARY = 97
NF4 = replace(LORA, nf4=True)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    save_untrained(path, VOCABULARY, 3, initializer_range=0.2)
    return path


@pytest.fixture(scope="module")
def config(model_path: Path) -> Config:
    written = [f"model.path={model_path}", f"model.tokenizer_path={MINI / 'tokenizer'}", "rollout.name=hf"]
    return load_config([*written, "lora.rank=4", "lora.base_dtype=nf4"])


@pytest.fixture(scope="module")
def base(config: Config, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = rounded_base(config, tmp_path_factory.mktemp("run")).model.path
    assert path is not None
    return path


@contextmanager
def rank_of(path: str, nf4: bool, dtype: torch.dtype = torch.float32) -> Iterator[TrainingRank]:
    spec = RankSpec(path, dtype, 1.0, OptimizerSettings(lr=1e-2), NF4 if nf4 else LORA, with_reference=True)
    try:
        yield build_rank(spec, WorkerContext(0, 1, port=free_port()))
    finally:
        gc.collect()
        dist.destroy_process_group()


def weights_of(path: str | Path) -> dict[str, Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict())


def test_a_weight_is_the_nearest_of_sixteen_multiples_of_its_block() -> None:
    # of the paper's appendix E, to three digits
    codes = torch.tensor(
        [-1.0, -0.696, -0.525, -0.395, -0.284, -0.185, -0.091, 0, 0.08, 0.161, 0.246, 0.338, 0.441, 0.563, 0.723, 1.0]
    )
    block = torch.linspace(-2.0, 2.0, 64).reshape(1, 64)
    found = rounded(block).float() / 2
    nearest = codes[(block.reshape(-1, 1) / 2 - codes).abs().argmin(1)].reshape(1, 64)
    torch.testing.assert_close(found, nearest, atol=0.003, rtol=0)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 70), st.integers(1, 65), st.sampled_from([1e-30, 1e-3, 1.0, 1e4]))
def test_rounding_again_changes_nothing(seed: int, rows: int, columns: int, scale: float) -> None:
    weight = scale * torch.randn(rows, 2 * columns, generator=torch.Generator().manual_seed(seed))
    weight[::7] = 0.0  # whole blocks, too
    once = rounded(weight)
    assert once.dtype == torch.bfloat16 and torch.equal(rounded(once), once)


def test_the_copy_differs_in_linear_layers_alone(model_path: Path, base: str) -> None:
    before, after = weights_of(model_path), weights_of(base)
    linear = {f"{name}.weight" for name in linear_layers(load_causal_lm(str(model_path)))}
    assert before.keys() == after.keys() and len(linear) == 14
    for name, weight in before.items():
        assert torch.equal(after[name], rounded(weight).float() if name in linear else weight), name
    assert sorted(path.name for path in Path(base).parent.iterdir()) == ["base"]


def test_the_copy_is_known_as_the_model_that_it_is_of(model_path: Path, base: str, tmp_path: Path) -> None:
    assert base_contents(base) == base_contents(str(model_path)) == folder_digests(model_path)
    copy = tmp_path / "base"
    shutil.copytree(base, copy)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    with pytest.raises(DataError, match="is not the copy that the run wrote"):
        base_contents(str(copy))


def test_ranks_hold_the_copy_in_four_bits(base: str) -> None:
    expected = weights_of(base)
    with rank_of(base, nf4=True) as rank:
        policy = rank.policy.engine
        assert isinstance(policy.module, PackedPolicy)
        layers = dict(nf4_layers(policy.module.model))
        assert len(layers) == 14
        for name, layer in layers.items():
            assert torch.equal(layer.detach().float(), expected[name.replace(".base_layer", "")])
            assert layer.nbytes == pytest.approx(layer.shape.numel() * 4.5 / 8, rel=0.02)
        others = sum(each.nbytes for each in policy.module.parameters())
        assert policy.param_bytes == others + sum(each.nbytes for each in layers.values())
        shape = shape_of(policy.module, policy.module.model.config)
        planned = resident(shape, RankSettings(compute=4, shards=1))["parameters"]
        assert planned == pytest.approx(policy.param_bytes, rel=1e-3)  # a block may be shorter than others
        assert (
            shape.parameters == sum(each.numel() for each in expected.values()) - VOCABULARY * 64 + shape.adapter
        )  # tied


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_is_that_of_an_adapter_on_the_copy(base: str, dtype: torch.dtype, tmp_path: Path) -> None:
    found = []
    for nf4 in (True, False):
        with rank_of(base, nf4, dtype) as rank:
            assert rank.reference is not None
            results = [rank.policy.engine.update(shard(), sft_loss) for _ in range(3)]
            engine = rank.policy.engine
            assert isinstance(engine.module, PackedPolicy)
            trained = engine.export_weights(adapter_tensors(engine.module.model))
            adapter = {name: full.clone() for name, full in trained}
            start_export(engine, folder := tmp_path / str(nf4), base).write()
            found.append((results, adapter, rank.reference.score(shard()), rank.model_info(), weights_of(folder)))
    (results, adapter, reference, info, merged), (expected, of_copy, its_reference, its_info, its_merged) = found
    assert [each.loss for each in results] == [each.loss for each in expected] and results[2].loss < results[0].loss
    assert [each.grad_norm for each in results] == [each.grad_norm for each in expected]
    assert info == its_info and (reference == its_reference).all()
    for one, other in ((adapter, of_copy), (merged, its_merged)):
        assert one.keys() == other.keys() and every(torch.equal(each, other[name]) for name, each in one.items())


def test_a_resume_goes_on_bit_for_bit(base: str, tmp_path: Path) -> None:
    losses = []
    with rank_of(base, nf4=True) as rank:
        rank.policy.engine.update(shard(), sft_loss)
        rank.save(tmp_path)
        losses += [rank.policy.engine.update(shard(), sft_loss).loss for _ in range(2)]
    with rank_of(base, nf4=True) as rank:
        rank.load(tmp_path)
        assert [rank.policy.engine.update(shard(), sft_loss).loss for _ in range(2)] == losses
    written = TensorReader(tmp_path / "actor").read_metadata().state_dict_metadata
    assert not [name for name in written if "packed" in name or "scales" in name or "base_layer" in name]


def test_gradients_pass_a_layer_in_four_bits() -> None:
    layer = torch.nn.Linear(70, 30, device="meta")
    hold_in_four_bits(layer)
    assert isinstance(layer, Nf4Linear)
    layer.to_empty(device="cpu")
    weight, bias = torch.randn(30, 70), torch.randn(30)
    layer.round_weight(weight.bfloat16())
    with torch.no_grad():
        layer.bias.copy_(bias)
    hidden = torch.randn(2, 5, 70, requires_grad=True)
    same = hidden.detach().clone().requires_grad_()
    output = layer(hidden)
    expected = torch.nn.functional.linear(same, rounded(weight).float(), bias)
    assert torch.equal(output, expected)
    upstream = torch.randn_like(output)
    output.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(hidden.grad, same.grad)


def refused(config: Config, folder: Path, **changes: str) -> str:
    model = replace(config.model, **changes)
    with pytest.raises(ConfigError) as error:
        rounded_base(replace(config, model=model), folder)
    assert list(folder.iterdir()) == []
    return str(error.value)


def test_a_pickle_is_refused(model_path: Path, config: Config, tmp_path: Path) -> None:
    pickled, run = tmp_path / "pickled", tmp_path / "run"
    run.mkdir()
    shutil.copytree(model_path, pickled)
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    assert "lora.base_dtype=nf4 needs safetensors" in refused(config, run, path=str(pickled))


def test_a_copy_that_cannot_be_written_leaves_the_old_one(base: str, config: Config, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(base, run / "base")
    no_room = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, no_room[1]))
    try:
        with pytest.raises(DataError, match=r"cannot be written|no space left"):
            rounded_base(config, run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, no_room)
    assert [path.name for path in run.iterdir()] == ["base"] and weights_of(run / "base").keys()


def test_a_folder_that_no_run_wrote_is_not_replaced(model_path: Path, config: Config, tmp_path: Path) -> None:
    own = Path(shutil.copytree(model_path, tmp_path / "base"))
    before = folder_digests(own)
    for path in (own, model_path):
        with pytest.raises(DataError, match="is where the rounded copy goes, and no run wrote it"):
            rounded_base(replace(config, model=replace(config.model, path=str(path))), tmp_path)
    assert folder_digests(own) == before


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        (["lora.base_dtype=fp4"], "lora.base_dtype must be auto or nf4"),
        (["lora.base_dtype=nf4"], "all weights are trained without lora.rank"),
        (["lora.rank=4", "lora.base_dtype=nf4", "lora.sync=merged"], "engines have the base already"),
    ],
)
def test_settings_without_effect_or_sense_are_refused(written: list[str], problem: str, model_path: Path) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_adapter(load_config([f"model.path={model_path}", *written]))


def test_without_its_library_the_setting_is_refused(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"needs bitsandbytes: pip install 'toolrl\[nf4\]'"):
        check_adapter(config)
