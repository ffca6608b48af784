"""Adapters beside their base in one server of vLLM: each has the name of its run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from toolrl.serve.openai_server.served_model import TrainedModel
from verl.build.base import base_contents, is_same_copy
from verl.config.load import named_model
from verl.config.schema import LoraConfig
from verl.embedded import embedded_path
from verl.errors import ConfigError
from verl.lora import RANKS, base_of, check_parts, lora_of
from verl.pretrained import check_hub

_MERGED = "serve the merged copy in hf/"


def common_base(models: Mapping[str, TrainedModel]) -> str:
    """The folder or hub name of the model that all of these adapters belong to.

    models: by name. Raises ConfigError if one has no adapter, another base, or one that is not here or has changed.
    """
    bases = {name: _base(model) for name, model in models.items()}
    (first, base), *others = bases.items()
    for name, other in others:
        if other != base and not is_same_copy(base, other):
            raise ConfigError(f"{name} is an adapter of {other}, {first} of {base}; one server has one base")
    return base


def adapter_arguments(models: Mapping[str, TrainedModel], base: str) -> list[str]:
    """vLLM's arguments for a base with these adapters; requests name one of them, or the base."""
    found = {name: lora_of(LoraConfig(path=str(model.adapter))) for name, model in models.items()}
    loras = {name: each for name, each in found.items() if each is not None}
    largest = max(each.rank for each in loras.values())
    if largest > RANKS[-1]:
        raise ConfigError(f"vLLM serves adapters up to rank {RANKS[-1]}, not {largest}; {_MERGED}")
    for name, each in loras.items():
        check_parts(each.targets, name, _MERGED)
    served = Path(base).name if Path(base).name not in models else f"{Path(base).name}-base"
    paths = {name: str(model.adapter) for name, model in models.items()}
    listed = [json.dumps({"name": name, "path": path, "base_model_name": served}) for name, path in paths.items()]
    return [
        *("--served-model-name", served),
        *("--enable-lora", "--max-loras", str(len(models))),
        *("--max-lora-rank", str(next(each for each in RANKS if each >= largest))),
        *("--lora-modules", *listed),
    ]


def _base(model: TrainedModel) -> str:
    if model.adapter is None:
        raise ConfigError(f"{model.folder} has no adapter; only adapters of one base are served side by side")
    merged = f"the merged copy is {model.folder}"
    base = embedded_path(named_model(base_of(str(model.adapter))))
    if Path(base).is_dir():
        base = str(Path(base).resolve())
    elif base.startswith((".", "/")) or base.count("/") > 1:
        raise ConfigError(f"{model.adapter}: its base {base!r} is not there; {merged}")
    check_hub(base, f"the base of {model.adapter}")
    recorded = (model.state.get("contents") or {}).get("model.path")
    found = base_contents(base)
    if recorded is not None and found is not None and recorded != found:
        raise ConfigError(f"{model.adapter}: its base {base!r} is not what it was at the training; {merged}")
    return base
