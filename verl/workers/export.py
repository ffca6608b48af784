"""Export of a policy to a folder that transformers and vLLM load directly."""

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_files

from verl.errors import DataError
from verl.host import untrusted_files
from verl.host.files import unwritable
from verl.lora import Lora, adapted_layers, adapter_tensors, base_tensors, save_adapter, with_updates
from verl.nf4 import Nf4Linear, nf4_layers
from verl.weight_files import Conversion, stored_conversions
from verl.workers.fsdp_engine import FSDPEngine, raise_any
from verl.workers.model import PackedPolicy

_FILE_BYTES = 2 << 30
_TOKENIZERS = ["tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"]  # one of these is enough
_FURTHER_FILES = ["tokenizer_config.json", "merges.txt", "special_tokens_map.json", "added_tokens.json"]
_TEMPLATE_FILES = ["chat_template.jinja", "chat_template.json"]
_PROCESSOR_FILES = ["processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"]
TOKENIZER_FILES = [*_TOKENIZERS, *_FURTHER_FILES, *_TEMPLATE_FILES]
BESIDE_WEIGHTS = ["generation_config.json", *_PROCESSOR_FILES]


def write_weights(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write one file of weights. Raises OSError and SafetensorError."""
    save_file(tensors, path, {"format": "pt"})  # transformers expects this entry


def export_hf(
    engine: FSDPEngine,
    folder: Path,
    model: str,
    tokenizer: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    file_bytes: int = _FILE_BYTES,
    write: Callable[[Path, dict[str, Tensor]], object] = write_weights,
) -> None:
    """Write the policy's weights, an adapter merged into them, its configurations and its tokenizer into `folder`.

    Collective. Ranks share the files of weights, and each gathers one of them at a time in CPU memory, in `dtype`.
    model: the folder or hub name that the policy was loaded from; its generation configuration is copied
    tokenizer: folder or hub name of the tokenizer, default `model`; its files are copied, because a tokenizer saved by
        one version of transformers cannot always be read by another
    file_bytes: most of one file, unless a weight needs more
    write: called with each file of this rank; it may keep the tensors, which are copies
    Raises DataError, on all ranks, if there is no tokenizer or any of them cannot write.
    """
    policy = engine.module
    assert isinstance(policy, PackedPolicy)
    ignored = policy.model._keys_to_ignore_on_save or ()
    weights = {name: each for name, each in stored_weights(policy.model) if name not in ignored}
    files = _planned(policy.model, {name: each.shape for name, each in weights.items()}, dtype, file_bytes)
    problem = None
    if engine.rank == 0:
        problem = problem_of(folder, partial(_write_beside, policy.model, files, folder, model, tokenizer, dtype))
    raise_any(problem)  # also waits: transformers first removes files of weights from the folder
    adapted = adapted_layers(policy.model)
    if not adapted and engine.num_ranks > 1:  # half as much to gather
        weights = {name: _rounded(each, dtype) for name, each in weights.items()}
    for first in range(0, len(files), engine.num_ranks):
        own: dict[str, Tensor] = {}
        for writer, file in enumerate(files[first : first + engine.num_ranks]):
            for conversion in file.conversions:
                named = [(name, weights[name]) for name, _ in conversion.sources]
                gathered = {}
                for name, full, update in with_updates(adapted, named, engine.export_weights):
                    if writer == engine.rank:
                        gathered[name] = _stored(full if update is None else full.float() + update, dtype)
                if gathered:
                    own |= conversion.apply(policy.model, gathered.__getitem__)
        if own and problem is None:  # after a problem the others still gather
            problem = problem_of(folder, partial(write, folder / files[first + engine.rank].name, own))
    raise_any(problem)


class WeightFile(NamedTuple):
    """A file to write: which tensors become which in it, and the bytes of each."""

    name: str
    conversions: list[Conversion]
    sizes: dict[str, int]


def _planned(
    model: PreTrainedModel, shapes: Mapping[str, torch.Size], dtype: torch.dtype, file_bytes: int
) -> list[WeightFile]:
    """Files of at most that size, with weights under the names that vLLM expects."""
    found: list[tuple[list[Conversion], dict[str, int]]] = []
    for conversion in stored_conversions(model, shapes):
        tensors = conversion.apply(model, lambda name: torch.empty(shapes[name], dtype=dtype, device="meta"))
        sizes = {name: each.nbytes for name, each in tensors.items()}
        if not found or sum(found[-1][1].values()) + sum(sizes.values()) > file_bytes:
            found.append(([], {}))
        found[-1][0].append(conversion)
        found[-1][1].update(sizes)
    stem, suffix = SAFE_WEIGHTS_NAME.split(".")
    parts = [f"-{number:05d}-of-{len(found):05d}" for number in range(1, len(found) + 1)] if len(found) > 1 else [""]
    return [WeightFile(f"{stem}{part}.{suffix}", *each) for part, each in zip(parts, found, strict=True)]


def _rounded(weight: Tensor | Nf4Linear, dtype: torch.dtype) -> Tensor | Nf4Linear:
    return weight.to(dtype) if isinstance(weight, Tensor) and weight.is_floating_point() else weight


def _stored(full: Tensor, dtype: torch.dtype) -> Tensor:
    return full.to("cpu", dtype if full.is_floating_point() else full.dtype, copy=True)  # training may go on


def problem_of(folder: Path, write: Callable[[], object]) -> DataError | None:
    """What prevents the writing into a folder, which is made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write()
    except DataError as error:
        return error
    except OSError as error:
        return unwritable(folder, error)
    except SafetensorError as error:
        return DataError(f"cannot be written ({error})", hint="Free some space", file=str(folder))
    return None


def export_adapter(engine: FSDPEngine, folder: Path, lora: Lora, model: str) -> None:
    """Write the policy's adapter into `folder` in peft's format, in float32. Collective; rank 0 writes.

    model: the folder or hub name of the base. Raises DataError, on all ranks, if the folder cannot be written.
    """
    policy = engine.module
    assert isinstance(policy, PackedPolicy)
    tensors = {name: full.cpu() for name, full in engine.export_weights(adapter_tensors(policy.model))}
    problem = None
    if engine.rank == 0:
        problem = problem_of(folder, partial(save_adapter, lora, tensors, folder, model))
    raise_any(problem)


def stored_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor | Nf4Linear]]:
    """(name, tensor) of the weights to store, without an adapter: a tied weight once, under its first name."""
    seen: set[int] = set()
    held = chain(model.state_dict(keep_vars=True).items(), nf4_layers(model))
    for name, tensor in base_tensors(model, held):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _write_beside(
    model: PreTrainedModel,
    files: Sequence[WeightFile],
    folder: Path,
    source: str,
    tokenizer: str | None,
    dtype: torch.dtype,
) -> None:
    """All but the weights. Through a model on the meta device: the trained one's config keeps its dtype."""
    with torch.device("meta"):
        shell = type(model)._from_config(copy.deepcopy(model.config), dtype=dtype)
    shell.save_pretrained(folder, state_dict={})
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(sum(each.sizes.values()) for each in files)},
            "weight_map": {name: each.name for each in files for name in each.sizes},
        }
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2))
    copy_files(source, BESIDE_WEIGHTS, folder)
    copy_files(tokenizer or source, TOKENIZER_FILES, folder)
    if not any((folder / name).exists() for name in _TOKENIZERS):
        raise DataError("contains no tokenizer", f"one of {', '.join(_TOKENIZERS)}", file=tokenizer or source)


def export_bytes(model: PreTrainedModel, dtype: torch.dtype = torch.bfloat16) -> int:
    """Size of the weights that are exported, all ranks' together."""
    return sum(math.prod(each.shape) for _, each in stored_weights(model)) * dtype.itemsize


def copy_files(source: str, names: list[str], folder: Path) -> None:
    """Copy those of the files that a model's folder, or a hub name, has."""
    for path in cached_files(source, names, _raise_exceptions_for_missing_entries=False) or []:
        untrusted_files.copy_file(Path(path), folder / Path(path).name)
