"""Export of a policy to a folder that transformers and vLLM load directly."""

import copy
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.hub import cached_files

from verl.errors import DataError
from verl.host import untrusted_files
from verl.host.files import unwritable
from verl.lora import Lora, adapter_tensors, base_tensors, save_adapter, with_updates
from verl.workers.fsdp_engine import FSDPEngine
from verl.workers.model import PackedPolicy

_TOKENIZER_FILES = ["tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"]  # one of these is enough
_FURTHER_FILES = ["tokenizer_config.json", "merges.txt", "special_tokens_map.json", "added_tokens.json"]
_TEMPLATE_FILES = ["chat_template.jinja", "chat_template.json"]
_PROCESSOR_FILES = ["processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"]


def export_hf(
    engine: FSDPEngine, folder: Path, model: str, tokenizer: str | None = None, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write the policy's weights, an adapter merged into them, its configurations and its tokenizer into `folder`.

    Collective; rank 0 writes, and holds the whole model in `dtype` in CPU memory meanwhile.
    model: the folder or hub name that the policy was loaded from; its generation configuration is copied
    tokenizer: folder or hub name of the tokenizer, default `model`; its files are copied, because a tokenizer saved by
        one version of transformers cannot always be read by another
    Raises DataError on rank 0 if there is no tokenizer or the folder cannot be written.
    """
    policy = engine.module
    assert isinstance(policy, PackedPolicy)
    weights = {}
    for name, full, update in with_updates(policy.model, stored_weights(policy.model), engine.export_weights):
        if engine.rank == 0:
            full = full if update is None else full.float() + update
            weights[name] = full.to("cpu", dtype if full.is_floating_point() else full.dtype)
    if engine.rank != 0:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_model(policy.model, weights, folder, dtype)
        _copy(model, ["generation_config.json", *_PROCESSOR_FILES], folder)
        _copy(tokenizer or model, [*_TOKENIZER_FILES, *_FURTHER_FILES, *_TEMPLATE_FILES], folder)
    except OSError as error:
        raise unwritable(folder, error) from error
    except SafetensorError as error:
        raise DataError(f"cannot be written ({error})", hint="Free some space", file=str(folder)) from error
    if not any((folder / name).exists() for name in _TOKENIZER_FILES):
        raise DataError("contains no tokenizer", f"one of {', '.join(_TOKENIZER_FILES)}", file=tokenizer or model)


def export_adapter(engine: FSDPEngine, folder: Path, lora: Lora, model: str) -> None:
    """Write the policy's adapter into `folder` in peft's format, in float32. Collective; rank 0 writes.

    model: the folder or hub name of the base. Raises DataError on rank 0 if the folder cannot be written.
    """
    policy = engine.module
    assert isinstance(policy, PackedPolicy)
    tensors = {name: full.cpu() for name, full in engine.export_weights(adapter_tensors(policy.model))}
    if engine.rank == 0:
        save_adapter(lora, tensors, folder, model)


def stored_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the weights to store, without an adapter: a tied weight once, under its first name."""
    seen: set[int] = set()
    for name, tensor in base_tensors(model, model.state_dict(keep_vars=True).items()):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _write_model(model: PreTrainedModel, weights: dict[str, Tensor], folder: Path, dtype: torch.dtype) -> None:
    """Saved through a model on the meta device, so that the file's dtype does not change the trained model's config."""
    with torch.device("meta"):
        shell = type(model)._from_config(copy.deepcopy(model.config), dtype=dtype)
    # Maps the module's names to those of the original file, which vLLM expects.
    shell._weight_conversions = getattr(model, "_weight_conversions", None)
    shell.save_pretrained(folder, state_dict=weights)


def _copy(source: str, names: list[str], folder: Path) -> None:
    for path in cached_files(source, names, _raise_exceptions_for_missing_entries=False) or []:
        untrusted_files.copy_file(Path(path), folder / Path(path).name)
