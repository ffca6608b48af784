"""Weights read by parts equal those of a model that is loaded as a whole, whatever its files are like."""

from __future__ import annotations

import gc
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AutoModelForCausalLM,
    HrmTextConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3MoeConfig,
)

from tests.support.multimodal import MULTIMODAL, multimodal_config
from tests.support.stateful import STATEFUL
from tests.verl.batch.test_packing import VOCABULARY, tiny_model
from tests.verl.checkpoint.test_checkpoint import TOKENIZER, critic_loss, in_ranks, policy_loss, rank_packs, values
from tests.verl.workers.test_fused import FORMULAS
from tests.verl.workers.test_parity import tiny_config
from verl.errors import ConfigError, DataError
from verl.lora import Lora, adapter_tensors, add_adapter
from verl.pretrained import class_of, read_causal_lm, read_model_config
from verl.weight_files import WeightFiles
from verl.workers.export import start_export
from verl.workers.fsdp_engine import FSDPEngine
from verl.workers.fused import fuse
from verl.workers.model import PackedCritic, PackedPolicy, decoder_layers, hf_named_parameters, load_causal_lm
from verl.workers.optim import OptimizerSettings

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_experts": 6,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
}
HRM = {"vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 40, "num_attention_heads": 4}
LORA = Lora(4, 8.0, ("all-linear",))
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def shaken(model: PreTrainedModel) -> PreTrainedModel:
    """With values that bfloat16 rounds, in norms and biases, too."""
    with torch.no_grad():
        for each in model.parameters():
            each.add_(torch.randn_like(each), alpha=0.1)
    return model


def of(config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return shaken(AutoModelForCausalLM.from_config(config))


def save(folder: Path, model: PreTrainedModel, **options: Any) -> None:
    model.save_pretrained(folder, **options)


def save_with_head(folder: Path, change: float) -> None:
    model = shaken(tiny_model("qwen2", True, torch.float32))
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, HEAD: tensors[EMBEDDING] + change}, folder / "model.safetensors", {"format": "pt"})


def save_pickle(folder: Path) -> None:
    model = shaken(tiny_model("qwen2", True, torch.float32))
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def yarn() -> Qwen2Config:
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    return Qwen2Config(**SHAPE, rope_parameters=rope, max_position_embeddings=256)


SAVED: dict[str, Callable[[Path], None]] = {
    "a tied head": lambda to: save(to, shaken(tiny_model("qwen2", True, torch.float32))),
    "several files": lambda to: save(to, shaken(tiny_model("llama", False, torch.float32)), max_shard_size="30KB"),
    "16 bits": lambda to: save(to, shaken(tiny_model("qwen3", False, torch.float32)).bfloat16()),
    "experts one by one": lambda to: save(to, of(Qwen3MoeConfig(**SHAPE)), max_shard_size="50KB"),
    "experts of other names": lambda to: save(to, of(MixtralConfig(**SHAPE))),
    "joint projections": lambda to: save(to, of(HrmTextConfig(**HRM, num_hidden_layers=2))),
    "the decoder alone": lambda to: save(to, shaken(tiny_model("qwen2", True, torch.float32)).model),
    "scaled rotary embeddings": lambda to: save(to, of(yarn())),
    "a pickle": save_pickle,
    "both of tied weights, equal": lambda to: save_with_head(to, 0.0),
    "both of tied weights, which differ": lambda to: save_with_head(to, 0.5),
}


def rows(tensor: Tensor, rank: int, num_ranks: int) -> slice:
    most = math.ceil(len(tensor) / num_ranks)
    return slice(min(most * rank, len(tensor)), min(most * (rank + 1), len(tensor)))


def read_by_ranks(files: WeightFiles, module: nn.Module, num_ranks: int) -> dict[Tensor, Tensor]:
    """The weights of a module on the meta device, put together from what each rank reads."""
    found: dict[Tensor, list[Tensor]] = {}
    for rank in range(num_ranks):
        own: dict[Tensor, Tensor] = {}

        def part(tensor: Tensor, rank: int = rank, own: dict[Tensor, Tensor] = own) -> tuple[Tensor, slice]:
            which = rows(tensor, rank, num_ranks)
            return own.setdefault(tensor, torch.empty_like(tensor[which], device="cpu")), which

        files.read(module, part)
        for tensor, held in own.items():
            found.setdefault(tensor, []).append(held)
    return {tensor: torch.cat(parts) for tensor, parts in found.items()}


def save_family(folder: Path, kind: str) -> None:
    config = multimodal_config(kind, VOCABULARY) if kind in MULTIMODAL else tiny_config(kind, **STATEFUL[kind])
    torch.manual_seed(0)
    shaken(class_of(config).from_config(config)).save_pretrained(folder)


SAVED |= {kind: partial(save_family, kind=kind) for kind in (*STATEFUL, *MULTIMODAL)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SAVED)
def test_rows_of_all_ranks_are_the_model(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    SAVED[name](tmp_path)
    wanted = class_of(read_model_config(str(tmp_path))).from_pretrained(tmp_path, dtype=dtype)
    for num_ranks in (1, 3):
        model = read_causal_lm(str(tmp_path), dtype, empty=True)
        files = WeightFiles(str(tmp_path), model)
        found = read_by_ranks(files, model, num_ranks)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        expected = dict(wanted.named_parameters(remove_duplicate=False))
        assert parameters.keys() == expected.keys()
        for key, tensor in expected.items():
            assert found[parameters[key]].dtype == tensor.dtype
            assert torch.equal(found[parameters[key]], tensor), key
        assert len({*parameters.values()}) == len({*expected.values()})  # tied alike
        buffers = dict(wanted.named_buffers())
        assert buffers or name in STATEFUL
        for key, buffer in model.named_buffers():
            assert torch.equal(found.get(buffer, buffer), buffers[key]), key


def test_a_critic_reads_no_head(tmp_path: Path) -> None:
    SAVED["several files"](tmp_path)
    model = load_causal_lm(str(tmp_path), empty=True)
    files = WeightFiles(str(tmp_path), model)
    critic = PackedCritic(model)
    for file in tmp_path.glob("*.safetensors"):
        if (tensors := load_file(file)).keys() & {HEAD}:
            save_file({**tensors, HEAD: tensors[HEAD] * math.nan}, file, {"format": "pt"})
    assert model.lm_head.weight not in read_by_ranks(files, critic, 2)
    with pytest.raises(ConfigError, match=rf"NaN or infinite: {HEAD}"):
        read_by_ranks(files, model, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_and_adapters_are_alike_beside_weights_that_are_not_there(dtype: torch.dtype, tmp_path: Path) -> None:
    SAVED["a tied head"](tmp_path)
    models = [load_causal_lm(str(tmp_path), dtype, empty=empty) for empty in (False, True)]
    fused = [fuse(model, FORMULAS) for model in models]
    assert fused[0] == fused[1] and fused[0].layers == 3
    for model in models:
        add_adapter(model, LORA, seed=3)
    whole, empty = (dict(adapter_tensors(model)) for model in models)
    assert whole.keys() == empty.keys() and all(torch.equal(each, empty[name]) for name, each in whole.items())
    trained = [[name for name, each in model.named_parameters() if each.requires_grad] for model in models]
    assert trained[0] == trained[1] and all(each.is_meta for each in models[1].get_submodule("model.norm").parameters())


@contextmanager
def allocations(folder: Path) -> Iterator[list[int]]:
    """The bytes that torch allocates in the block (freed: negative), in order, without files mapped into memory."""
    files = {file.stat().st_size for file in folder.iterdir()}
    found: list[int] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        yield found
    events = [each for each in recorded.profiler.kineto_results.events() if each.name() == "[memory]"]
    events.sort(key=lambda each: each.start_ns())
    found += [each.nbytes() for each in events if abs(each.nbytes()) not in files]


def peak(allocated: list[int]) -> int:
    total, most = 0, 0
    for each in allocated:
        total += each
        most = max(most, total)
    return most


CASES = {  # name: (how it was saved, wrapper, loss, adapter, dtype of computation)
    "policy": ("16 bits", PackedPolicy, policy_loss, None, torch.float32),
    "critic": ("several files", PackedCritic, critic_loss, None, torch.float32),
    "experts": ("experts one by one", PackedPolicy, policy_loss, None, torch.float32),
    "adapter": ("a tied head", PackedPolicy, policy_loss, LORA, torch.bfloat16),
    "critic's adapter": ("a tied head", PackedCritic, critic_loss, LORA, torch.bfloat16),
}


def engine_of(name: str, folder: Path, mesh: Any, by_shards: bool) -> FSDPEngine:
    saved, wrapper, _, lora, dtype = CASES[name]
    path = str(folder / saved)
    model = load_causal_lm(path, torch.float32 if lora is None else dtype, empty=by_shards)
    weights = WeightFiles(path, model) if by_shards else None
    if lora is not None:
        add_adapter(model, lora)
    module: Any = wrapper(model)
    settings = OptimizerSettings(lr=1e-2)
    return FSDPEngine(module, decoder_layers(module), mesh, settings, dtype, weights=weights)


def state(engine: FSDPEngine) -> dict[str, Tensor]:
    tensors = {**dict(engine.module.named_parameters()), **dict(engine.module.named_buffers())}
    held = {name: each.to_local() if isinstance(each, DTensor) else each for name, each in tensors.items()}
    return {name: each.detach().clone() for name, each in held.items()}


def compare(rank: int, world: int, folder: Path, per_node: int | None = None) -> None:
    """Both ways of loading on this rank: the same rows, and the same three updates."""
    packs = rank_packs(rank, world)
    shape = (world,) if per_node is None else (world // per_node, per_node)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for name, (saved, _, loss, lora, _) in CASES.items():
        whole, shards = (engine_of(name, folder, mesh, by_shards) for by_shards in (False, True))
        assert_equal(state(whole), state(shards))
        for _ in range(3):
            assert values(whole.update(packs, loss)) == values(shards.update(packs, loss))
        assert_equal(state(whole), state(shards))
        if lora is None and isinstance(shards.module, PackedPolicy):
            check_export(shards, folder / saved, folder / f"exported {name}")
    if world == 4:
        check_error(folder, mesh)
    if mesh.shape == (4,):
        check_growth(folder, mesh)


def assert_equal(wanted: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    assert wanted.keys() == found.keys()
    for name, each in wanted.items():
        assert each.dtype == found[name].dtype and torch.equal(each, found[name]), name


def names_in(folder: Path) -> list[str]:
    return sorted(name for file in folder.glob("*.safetensors") for name in load_file(file))


def check_export(engine: FSDPEngine, source: Path, to: Path) -> None:
    """Several files by several ranks, with the names that the model came with, are the model again."""
    start_export(engine, to, TOKENIZER, dtype=torch.float32, file_bytes=30_000).write()
    named = hf_named_parameters(engine.module)
    weights = {name: full.clone() for name, full in engine.export_weights(named)}
    assert names_in(to) == names_in(source) and len([*to.glob("*.safetensors")]) > 4
    model, report = AutoModelForCausalLM.from_pretrained(to, dtype="auto", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_equal(weights, dict(model.named_parameters(remove_duplicate=False)))
    second = sorted(each.name for each in to.glob("*.safetensors"))[1]
    (to / "taken" / second).mkdir(parents=True, exist_ok=True)
    with pytest.raises(DataError, match=r"taken: cannot be written"):  # on all ranks
        start_export(engine, to / "taken", TOKENIZER, dtype=torch.float32, file_bytes=30_000).write()


def check_growth(folder: Path, mesh: Any) -> None:
    """A rank's memory grows by its shard, and at most by the largest tensor more; with a whole model by more."""
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # all in this thread, the one that is recorded
    for name, by_shards in (("policy", True), ("critic", True), ("experts", True), ("policy", False)):
        gc.collect()  # now: what is freed in the block would count there
        with allocations(folder / CASES[name][0]) as allocated:
            engine = engine_of(name, folder, mesh, by_shards)
        sizes = [each.numel() * each.element_size() for each in engine.module.parameters()]
        rows = [
            (len(each), math.ceil(len(each) / engine.num_shards)) for each in engine.module.parameters()
        ]  # FSDP fills shards up
        bound = sum(size // every * own for size, (every, own) in zip(sizes, rows, strict=True)) + max(sizes)
        found = peak(allocated)
        assert found <= bound < sum(sizes) if by_shards else found > bound, (name, by_shards, found, bound, sum(sizes))
        del engine


def check_error(folder: Path, mesh: Any) -> None:
    """A number that only the last rank reads ends the loading on all."""
    with pytest.raises(ConfigError, match=r"^model.path: .*NaN or infinite: model\.layers\.1\.mlp\.up_proj\.weight\."):
        model = load_causal_lm(str(folder / "broken"), empty=True)
        weights = WeightFiles(str(folder / "broken"), model)
        module = PackedPolicy(model)
        FSDPEngine(module, decoder_layers(module), mesh, weights=weights)


@pytest.mark.long
@pytest.mark.parametrize(("world", "per_node"), [(1, None), (2, None), (4, None), (4, 2)])
def test_ranks_that_read_their_rows_train_as_with_whole_models(
    world: int, per_node: int | None, tmp_path: Path
) -> None:
    for name in {saved for saved, *_ in CASES.values()}:
        SAVED[name](tmp_path / name)
    shutil.copytree(tmp_path / "a tied head", tmp_path / "broken")
    tensors = load_file(tmp_path / "broken" / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][-1, 0] = math.nan
    save_file(tensors, tmp_path / "broken" / "model.safetensors", {"format": "pt"})
    in_ranks(world, compare, tmp_path, per_node)
