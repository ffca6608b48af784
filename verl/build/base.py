"""The model that ranks and engines load: that of the command, or with lora.base_dtype=nf4 a rounded copy of it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from verl.checkpoint.contents import contents_of
from verl.checkpoint.manifest import read_json
from verl.config.schema import Config
from verl.errors import DataError
from verl.host.digests import folder_digests
from verl.host.files import temporary_name
from verl.lora import linear_layers
from verl.nf4 import NF4
from verl.weight_files import WeightFiles
from verl.workers.export import BESIDE_WEIGHTS, TOKENIZER_FILES, copy_files, problem_of
from verl.workers.model import load_causal_lm

_BASE = "base"  # in a run's folder
_ROUNDED = "rounded.json"  # in the copy: {"of": contents of the model, "files": {name: SHA-256} of the copy's}
_PATH = "model.path"


def rounded_base(config: Config, folder: Path) -> Config:
    """The configuration with the model to load in place of its own. folder: of the run

    Raises ConfigError for files that do not hold each linear layer by itself, DataError if the copy cannot be written,
    or would replace what no run wrote.
    """
    path = config.model.path
    if config.lora.base_dtype != NF4 or path is None:
        return config
    model = load_causal_lm(path, torch.bfloat16, empty=True)
    weights, names = WeightFiles(path, model), {f"{name}.weight" for name in linear_layers(model)}
    base = folder / _BASE
    if base.exists() and not (base / _ROUNDED).is_file():
        raise DataError("is where the rounded copy goes, and no run wrote it", hint="Move it away", file=str(base))
    unfinished = temporary_name(base)

    def write() -> None:
        weights.write_rounded(unfinished, names)
        copy_files(path, [CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, *BESIDE_WEIGHTS], unfinished)
        copy_files(config.model.tokenizer_path or path, TOKENIZER_FILES, unfinished)
        record = {"of": _contents(path), "files": folder_digests(unfinished)}
        (unfinished / _ROUNDED).write_text(json.dumps(record))
        shutil.rmtree(base, ignore_errors=True)
        unfinished.rename(base)

    try:
        if (problem := problem_of(unfinished, write)) is not None:
            raise problem
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return replace(config, model=replace(config.model, path=str(base)))


def base_contents(base: str) -> Any:
    """What identifies the base of an adapter, as a checkpoint records it: for a rounded copy, the model that it is of.

    base: its folder or hub name. Raises DataError for a copy that is not as it was written.
    """
    copy = Path(base)
    if not (copy / _ROUNDED).is_file():
        return _contents(base)
    record = read_json(copy / _ROUNDED)
    if record.get("files") != folder_digests(copy, [_ROUNDED]):
        raise DataError("is not the copy that the run wrote", hint="Resume the run, which writes it again", file=base)
    return record.get("of")


def is_same_copy(base: str, other: str) -> bool:
    """Whether both are rounded copies with the same files, as those of two runs on one model."""
    records = [Path(each) / _ROUNDED for each in (base, other)]
    return all(each.is_file() for each in records) and read_json(records[0]) == read_json(records[1])


def _contents(path: str) -> Any:
    return contents_of({_PATH: path}, reads_weights=True).get(_PATH)
