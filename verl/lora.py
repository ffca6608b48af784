"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685) by peft: W + alpha / rank * B A, with W frozen.

Adapted models keep the modules of transformers, with peft's layers in place of the targets. Names of an adapter's
tensors are those of peft's files, which vLLM reads, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl.config.schema import LoraConfig
from verl.errors import ConfigError, DataError
from verl.host import untrusted_files
from verl.host.files import unwritable
from verl.nf4 import NF4, Nf4Linear, hold_in_four_bits
from verl.pretrained import check_files, class_of, read_model_config
from verl.text import in_short

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vLLM's limits of an adapter's rank
ALL_LINEAR = "all-linear"
_ALPHA = 32.0  # with it the best learning rate hardly depends on the rank (https://thinkingmachines.ai/blog/lora/)
_ADAPTER = "default"  # peft's name of a model's only adapter
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_BASE_NAME = "base_model_name_or_path"
_MOST_CONFIG = 1 << 20  # bytes
_PREFIX = "base_model.model."  # of the names in peft's files
_EXPERTS = "experts"
# vLLM computes both as one layer, and finds the place of the second by the rows of the first.
_FIRST, _SECOND = "in_proj_qkv", "in_proj_z"
# peft adapts no such layer of these models: Mamba's kernels read its weight around the adapter.
_UNADAPTED, _WITH_UNADAPTED = "out_proj", ("falcon_h1", "nemotron_h")
# What an adapter may not have: vLLM or this trainer would ignore it.
_UNSUPPORTED = ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "layer_replication", "lora_bias")

# Full tensors of those that are sharded or in four bits.
Export = Callable[[Iterable[tuple[str, Tensor | Nf4Linear]]], Iterator[tuple[str, Tensor]]]


@dataclass(frozen=True, slots=True)
class Lora:
    """An adapter of a model. Picklable: ranks and engines, which build it, live in other processes."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    path: str | None = None  # a folder with the adapter to start from; None: B = 0
    merged: bool = False  # whether a weight sync sends merged weights, not the adapter
    nf4: bool = False  # whether ranks hold the frozen linear layers in four bits


def lora_of(config: LoraConfig) -> Lora | None:
    """The settings of an adapter, or of the adapter at `lora.path`; None: all weights are trained.

    Raises ConfigError if there is no adapter at the path, or one with other values than those that are set.
    """
    if not config.enabled:
        return None
    own: dict[str, Any] = {"rank": config.rank or None, "alpha": config.alpha, "targets": config.targets}
    if config.path is None:
        found: dict[str, Any] = {"rank": None, "alpha": _ALPHA, "targets": [ALL_LINEAR]}
    else:
        found = _read_config(config.path)
        for name, value in own.items():
            if name != "targets" and value is not None and value != found[name]:
                raise ConfigError(f"lora.{name}={value}, but the adapter in {config.path!r} has {found[name]}")
    known = {name: found[name] if value is None else value for name, value in own.items()}
    merged, nf4 = config.sync == "merged", config.base_dtype == NF4
    return Lora(known["rank"], float(known["alpha"]), tuple(known["targets"]), config.path, merged, nf4)


def _read_config(path: str) -> dict[str, Any]:
    check_files(path, "lora.path")
    try:
        read = json.loads(untrusted_files.read(Path(path), _CONFIG, _MOST_CONFIG))
        targets = read["target_modules"]
        found = {"rank": read["r"], "alpha": float(read["lora_alpha"]), "base": read.get(_BASE_NAME)}
    except (DataError, OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"lora.path: no adapter of peft can be read from {path!r} ({in_short(error)})") from error
    if unsupported := [name for name in _UNSUPPORTED if read.get(name)]:
        raise ConfigError(f"lora.path: the adapter in {path!r} has {', '.join(unsupported)}, which is not supported")
    scaled = read.get("use_rslora")  # alpha / sqrt(rank)
    return {
        "rank": found["rank"],
        "alpha": found["alpha"] * found["rank"] ** 0.5 if scaled else found["alpha"],
        "targets": [targets] if isinstance(targets, str) else sorted(targets),
        "base": found["base"],
    }


def base_of(path: str) -> str:
    """The folder or hub name of the model that the adapter at a path belongs to, by its own account.

    Raises ConfigError if there is no adapter, or if it names none.
    """
    base = _read_config(path)["base"]
    if not isinstance(base, str) or not base:
        raise ConfigError(f"the adapter {path!r} names no base: base_model_name_or_path in {_CONFIG} is {base!r}")
    return base


def name_base(folder: Path, base: str) -> None:
    """Name another folder or hub name as the base of the adapter in a folder."""
    config = json.loads(untrusted_files.read(folder, _CONFIG, _MOST_CONFIG))
    (folder / _CONFIG).write_text(json.dumps({**config, _BASE_NAME: base}, indent=2) + "\n")


def check_targets(lora: Lora, model_path: str) -> list[str]:
    """`target_modules` before the model is loaded. Raises ConfigError, as `add_adapter` does."""
    config = read_model_config(model_path)
    with torch.device("meta"):
        model = class_of(config).from_config(config, trust_remote_code=False)
    return target_modules(model, lora)


def check_parts(names: Collection[str], of: str, hint: str) -> None:
    """Raises ConfigError for an adapter of layers with these names that vLLM cannot have.

    of: where the names are from; hint: what to do
    """
    second = (name for name in names if f".{name}".endswith(f".{_SECOND}"))
    if alone := [name for name in second if name.removesuffix(_SECOND) + _FIRST not in names]:
        raise ConfigError(f"{of}: vLLM has no adapter of {alone[0]} without one of {_FIRST} beside it; {hint}")


def target_modules(model: PreTrainedModel, lora: Lora) -> list[str]:
    """The names of the linear layers that get an adapter.

    Raises ConfigError for a target that names none, with those that there are, and for experts.
    """
    linear = linear_layers(model)
    experts = [name for name, _ in model.named_modules() if name.rpartition(".")[2] == _EXPERTS]
    there = sorted({name.rpartition(".")[2] for name in linear if f".{_EXPERTS}." not in name})
    chosen: list[str] = []
    for target in lora.targets:
        found = linear if target == ALL_LINEAR else [name for name in linear if f".{name}".endswith(f".{target}")]
        in_experts = [name for name in found if f".{_EXPERTS}." in name]
        if in_experts or (experts and (target in (ALL_LINEAR, _EXPERTS) or not found)):
            raise ConfigError(
                f"lora.targets: {target} is in experts or includes them. Mixture-of-experts layers are not trained by "
                f"adapters, as their engines do not take such weights; choose among {', '.join(there)}"
            )
        if not found:
            raise ConfigError(f"lora.targets: no linear layer is named {target}; there are {', '.join(there)}")
        chosen += found
    return sorted(set(chosen))


def linear_layers(model: PreTrainedModel) -> list[str]:
    """The names of the linear layers that text passes, without the output head."""
    head = model.get_output_embeddings()  # log-probs are computed from its weight alone
    of_text = {*model.get_decoder().modules()} - {head}
    linear = [name for name, each in model.named_modules() if isinstance(each, nn.Linear) and each in of_text]
    if model.config.model_type in _WITH_UNADAPTED:
        return [name for name in linear if name.rpartition(".")[2] != _UNADAPTED]
    return linear


def add_adapter(model: PreTrainedModel, lora: Lora, seed: int = 0) -> None:
    """Freeze the model and add the adapter in place, in float32, equal on all ranks. Raises ConfigError.

    With `lora.nf4` the model must be on the meta device, as its weights are rounded where they are read.
    """
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    names, frozen = target_modules(model, lora), [model.get_submodule(each) for each in linear_layers(model)]
    own = PeftConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=names, bias="none")
    with torch.random.fork_rng(devices=[]), _on_cpu(model.get_submodule(name) for name in names):
        torch.manual_seed(seed)
        inject_adapter_in_model(own, model)
    for _, parameter in adapter_tensors(model):
        parameter.data = parameter.data.float()
    if lora.nf4:
        for layer in frozen:
            hold_in_four_bits(cast(nn.Linear, layer))
    if lora.path is not None:
        _load(model, lora.path)


@contextmanager
def _on_cpu(layers: Iterable[Any]) -> Iterator[None]:
    """Weights on the meta device are one repeated number on the CPU in the block: peft puts adapters beside them."""
    empty = {layer: layer.weight for layer in layers if layer.weight.is_meta}
    for layer, weight in empty.items():
        layer.weight = nn.Parameter(torch.zeros((), dtype=weight.dtype).expand(weight.shape), requires_grad=False)
    try:
        yield
    finally:
        for layer, weight in empty.items():
            layer.weight = weight.requires_grad_(layer.weight.requires_grad)


@torch.no_grad()
def _load(model: PreTrainedModel, path: str) -> None:
    there, own = load_file(Path(path) / _WEIGHTS), dict(adapter_tensors(model))
    fits = there.keys() == own.keys() and all(there[name].shape == own[name].shape for name in own)
    if not fits:
        odd = sorted(there.keys() ^ own.keys())[:3] or "other shapes"
        raise ConfigError(f"lora.path: the adapter in {path!r} is of another model: {odd}")
    if broken := [name for name, tensor in there.items() if not bool(torch.isfinite(tensor).all())]:
        raise ConfigError(f"lora.path: the adapter in {path!r} has tensors that are NaN or infinite: {broken[0]}")
    for name, parameter in own.items():
        parameter.copy_(there[name])


def adapter_tensors(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name as in peft's files, parameter) of a model's adapter; nothing without one."""
    for name, parameter in model.named_parameters():
        if f".{_ADAPTER}." in name:
            yield f"{_PREFIX}{name.replace(f'.{_ADAPTER}.', '.')}", parameter


def base_tensors(model: nn.Module, named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """(name without adapter, tensor) of those of the model that are not its adapter's."""
    for name, tensor in named:
        if f".{_ADAPTER}." not in name:
            yield name.replace(".base_layer.", "."), tensor


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """{name: peft's layer} of every module with an adapter."""
    return {name: each for name, each in model.named_modules() if _ADAPTER in getattr(each, "lora_A", ())}


def factors_of(layer: nn.Module) -> tuple[nn.Module, Tensor, Tensor, float] | None:
    """(base layer, A [rank, inputs], B [outputs, rank], scale) of peft's layer; None for one without an adapter."""
    if _ADAPTER not in getattr(layer, "lora_A", ()):
        return None
    adapted: Any = layer
    down, up = (each[_ADAPTER].weight for each in (adapted.lora_A, adapted.lora_B))
    return adapted.base_layer, down, up, adapted.scaling[_ADAPTER]


def with_updates(
    layers: Mapping[str, Any], named: Iterable[tuple[str, Tensor | Nf4Linear]], export: Export
) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """(name, full base weight, what the adapter adds to it in float32, or None), one at a time.

    Collective, like `export`. The adapted weight is the sum of both.
    layers: `adapted_layers` of the model
    """
    for name, tensor in named:
        ((_, full),) = export([(name, tensor)])
        layer = layers.get(name.removesuffix(".weight"))
        factors = None if layer is None else factors_of(layer)
        if factors is None:
            yield name, full, None
            continue
        _, *tensors, scale = factors
        (_, down), (_, up) = export(zip("AB", tensors, strict=True))
        yield name, full, weight_update(down, up, scale)


def weight_update(down: Tensor, up: Tensor, scale: float) -> Tensor:
    """What an adapter with these full factors adds to a weight, in float32."""
    return scale * (up.float() @ down.float())


@contextmanager
def base_alone(model: nn.Module) -> Iterator[None]:
    """Within the block the model computes what it does without its adapter, to the last bit."""
    layers = [*adapted_layers(model).values()]
    scales = [layer.scaling[_ADAPTER] for layer in layers]
    try:
        for layer in layers:
            layer.scaling[_ADAPTER] = 0.0
        yield
    finally:
        for layer, scale in zip(layers, scales, strict=True):
            layer.scaling[_ADAPTER] = scale


def save_adapter(lora: Lora, tensors: Mapping[str, Tensor], folder: Path, base: str) -> None:
    """Write an adapter as `PeftModel.from_pretrained` and vLLM load it. base: folder or hub name of its model

    Raises DataError if the folder cannot be written.
    """
    from peft import LoraConfig as PeftConfig

    modules = {name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in tensors}
    if not any("." in target for target in lora.targets):
        modules = {name.rpartition(".")[2] for name in modules}  # those of all layers
    own = PeftConfig(
        r=lora.rank,
        lora_alpha=int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        target_modules=sorted(modules),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        own.save_pretrained(str(folder))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / _WEIGHTS, {"format": "pt"})
    except OSError as error:
        raise unwritable(folder, error) from error
    except SafetensorError as error:
        raise DataError(f"cannot be written ({error})", hint="Free some space", file=str(folder)) from error
