"""Export of a policy to a folder that transformers and vLLM load directly."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_files

from verl.errors import DataError
from verl.host import untrusted_files
from verl.host.files import unwritable
from verl.lora import (
    Lora,
    adapted_layers,
    adapter_tensors,
    base_tensors,
    factors_of,
    save_adapter,
    weight_update,
)
from verl.nf4 import Nf4Linear, nf4_layers
from verl.weight_files import Conversion, stored_conversions
from verl.workers.fsdp_engine import FSDPEngine, raise_any
from verl.workers.model import PackedPolicy
from verl.workers.weight_shard import WeightShard

_FILE_BYTES = 2 << 30
_TOKENIZERS = ["tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"]  # one of these is enough
_FURTHER_FILES = ["tokenizer_config.json", "merges.txt", "special_tokens_map.json", "added_tokens.json"]
_TEMPLATE_FILES = ["chat_template.jinja", "chat_template.json"]
_PROCESSOR_FILES = ["processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"]
TOKENIZER_FILES = [*_TOKENIZERS, *_FURTHER_FILES, *_TEMPLATE_FILES]
BESIDE_WEIGHTS = ["generation_config.json", *_PROCESSOR_FILES]


def start_export(
    engine: FSDPEngine,
    folder: Path,
    model: str,
    tokenizer: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    file_bytes: int = _FILE_BYTES,
) -> HfExport:
    """Write the policy's configurations and its tokenizer into `folder`. Collective; `write` adds its weights.

    Weights are stored in `dtype`, with an adapter merged into them.
    model: the folder or hub name that the policy was loaded from; its generation configuration is copied
    tokenizer: folder or hub name of the tokenizer, default `model`; its files are copied, because a tokenizer saved by
        one version of transformers cannot always be read by another
    file_bytes: most of one file, unless a weight needs more
    Raises DataError, on all ranks, if there is no tokenizer or the folder cannot be written.
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
    layers = {f"{name}.weight": each for name, each in adapted_layers(policy.model).items()}
    found = {name: StoredWeight.of(each, layers.get(name), dtype) for name, each in weights.items()}
    return HfExport(folder, policy.model, files, found)


class StoredWeight(NamedTuple):
    """A weight to store, with the factors of an adapter that is to be merged into it."""

    base: WeightShard
    factors: tuple[WeightShard, WeightShard, float] | None  # A, B, scale
    dtype: torch.dtype

    @classmethod
    def of(cls, weight: Tensor | Nf4Linear, layer: nn.Module | None, dtype: torch.dtype) -> Self:
        found = None if layer is None else factors_of(layer)
        if found is None:
            return cls(WeightShard.of(weight), None, dtype)
        _, down, up, scale = found
        return cls(WeightShard.of(weight), (WeightShard.of(down), WeightShard.of(up), scale), dtype)

    def copied(self, writer: int) -> Self:
        if self.factors is None:
            return self._replace(base=self.base.copied(writer, self.dtype))
        down, up, scale = self.factors
        return self._replace(base=self.base.copied(writer), factors=(down.copied(writer), up.copied(writer), scale))

    def copy_bytes(self, writer: int) -> int:
        """Size of what `copied` copies."""
        if self.factors is None:
            return self.base.copy_bytes(writer, self.dtype)
        down, up, _ = self.factors
        return sum(each.copy_bytes(writer) for each in (self.base, down, up))

    def gathered(self, writer: int, group: dist.ProcessGroup | None) -> Tensor:
        """See `WeightShard.gathered`."""
        if self.factors is None:
            return self.base.gathered(writer, self.dtype, group)  # rounded before it is sent
        *shards, scale = self.factors
        full, down, up = (each.gathered(writer, None, group) for each in (self.base, *shards))
        return (full.float() + weight_update(down, up, scale)).to(self.dtype)


@dataclass(frozen=True, slots=True)
class HfExport:
    """Files of weights that are to be written."""

    folder: Path
    model: PreTrainedModel
    files: Sequence[WeightFile]
    weights: dict[str, StoredWeight]  # that are not written yet

    def copied(self) -> Self:
        """With copies of the weights in host memory, so that training may go on before they are written."""
        return replace(self, weights={name: self.weights[name].copied(writer) for name, writer in self._writers()})

    @property
    def copy_bytes(self) -> int:
        """Most memory of this rank's for copies, and for a file that it gathers."""
        copies = sum(self.weights[name].copy_bytes(writer) for name, writer in self._writers())
        own = self.files[dist.get_rank() :: dist.get_world_size()]
        return copies + max((sum(file.sizes.values()) for file in own), default=0)

    def _writers(self) -> Iterator[tuple[str, int]]:
        """(a weight's name, the rank that writes it)"""
        for number, file in enumerate(self.files):
            for name in file.sources:
                yield name, number % dist.get_world_size()

    def write(self, group: dist.ProcessGroup | None = None) -> None:
        """Each rank gathers one file at a time in CPU memory and writes it. To be called once.

        Collective of a Gloo group, default the default one.
        Raises DataError, on all ranks, if any of them cannot write.
        """
        problem, size = None, dist.get_world_size()
        for first in range(0, len(self.files), size):
            own: list[tuple[WeightFile, dict[str, Tensor]]] = []
            for writer, file in enumerate(self.files[first : first + size]):
                gathered = {name: self.weights.pop(name).gathered(writer, group) for name in file.sources}
                if writer == dist.get_rank():
                    own.append((file, gathered))
            for each in own:
                if problem is None:  # after a problem the others still gather
                    problem = problem_of(self.folder, partial(self._write, *each))
        raise_any(problem, group)

    def _write(self, file: WeightFile, weights: Mapping[str, Tensor]) -> None:
        tensors: dict[str, Tensor] = {}
        for conversion in file.conversions:
            tensors |= conversion.apply(self.model, weights.__getitem__)
        save_file(tensors, self.folder / file.name, {"format": "pt"})  # transformers expects this entry


class WeightFile(NamedTuple):
    """A file to write: which tensors become which in it, and the bytes of each."""

    name: str
    conversions: list[Conversion]
    sizes: dict[str, int]

    @property
    def sources(self) -> list[str]:
        """Names of the model's weights that it is made of."""
        return [name for conversion in self.conversions for name, _ in conversion.sources]


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


def start_adapter_export(engine: FSDPEngine, folder: Path, lora: Lora, model: str) -> AdapterExport:
    """The policy's adapter, to be written into `folder` in peft's format, in float32.

    model: the folder or hub name of the base
    """
    policy = engine.module
    assert isinstance(policy, PackedPolicy)
    return AdapterExport(
        folder, lora, model, {name: WeightShard.of(each) for name, each in adapter_tensors(policy.model)}
    )


@dataclass(frozen=True, slots=True)
class AdapterExport:
    """An adapter that is to be written by the first rank."""

    folder: Path
    lora: Lora
    model: str
    tensors: Mapping[str, WeightShard]

    def copied(self) -> Self:
        """See `HfExport.copied`."""
        return replace(self, tensors={name: each.copied(0) for name, each in self.tensors.items()})

    @property
    def copy_bytes(self) -> int:
        """See `HfExport.copy_bytes`."""
        copies = sum(each.copy_bytes(0) for each in self.tensors.values())
        whole = sum(each.shape.numel() * each.held.dtype.itemsize for each in self.tensors.values())
        return copies + (whole if dist.get_rank() == 0 else 0)

    def write(self, group: dist.ProcessGroup | None = None) -> None:
        """See `HfExport.write`."""
        tensors = {name: each.gathered(0, None, group) for name, each in self.tensors.items()}
        problem = None
        if dist.get_rank() == 0:
            problem = problem_of(self.folder, partial(save_adapter, self.lora, tensors, self.folder, self.model))
        raise_any(problem, group)


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


def copy_files(source: str, names: list[str], folder: Path) -> None:
    """Copy those of the files that a model's folder, or a hub name, has."""
    for path in cached_files(source, names, _raise_exceptions_for_missing_entries=False) or []:
        untrusted_files.copy_file(Path(path), folder / Path(path).name)
