"""Weights in a model's files, read row by row: a process that holds a part of a model reads that part alone.

Names in files may differ from those of transformers' model, and several tensors there may be one of the model, as
experts are. The conversions are transformers' own, in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)
from transformers.modeling_utils import load_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from verl.errors import ConfigError
from verl.nf4 import Nf4Linear, rounded
from verl.pretrained import is_finite, readable, refuse_odd

Renamed = tuple[str, str | None]  # the (first) new name, and the pattern of the converter, if it takes one
_WEIGHT = ".weight"
Part = Callable[[Tensor], tuple[Tensor, Any]]  # a tensor of the model -> what is held of it here, and its rows


@dataclass(frozen=True, slots=True)
class Conversion:
    """Tensors that get new names together: one, or those that are merged or split."""

    transform: WeightTransform
    target: str  # the first of the new names
    sources: list[tuple[str, str]]  # (name, the transform's pattern that it matches)

    @property
    def renames(self) -> bool:
        """Whether one tensor gets another name, and nothing else."""
        return isinstance(self.transform, WeightRenaming)

    @property
    def stacks(self) -> bool:
        """Whether each row of the new tensor comes from one tensor of each pattern, as an expert's."""
        first, *others = getattr(self.transform, "operations", None) or [None]
        stacked = isinstance(first, MergeModulelist) and first.dim == 0
        return stacked and all(isinstance(each, Concatenate) and each.dim != 0 for each in others)

    def of_rows(self, rows: Any) -> Conversion:
        """The part of one that stacks."""
        of_pattern: dict[str, list[tuple[str, str]]] = {}
        for source in self.sources:
            of_pattern.setdefault(source[1], []).append(source)
        return replace(self, sources=[source for each in of_pattern.values() for source in each[rows]])

    def apply(self, model: PreTrainedModel, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The new tensors by name."""
        transform: Any = deepcopy(self.transform)
        for name, pattern in self.sources:
            transform.add_tensor(self.target, name, pattern, read(name))
        converted = transform.convert(self.target, model=model, config=model.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in converted.items()}


def stored_conversions(model: PreTrainedModel, names: Iterable[str]) -> list[Conversion]:
    """From the model's names to those of the files that it was loaded from, or that its kind has."""
    used = getattr(model, "_weight_conversions", None)
    if used is None:
        default = get_model_conversion_mapping(model, add_legacy=False)
        used = [each for each in default if not isinstance(each, PrefixChange)]  # which files may lack
    reverse = [each.reverse_transform() for each in used[::-1]]
    return _conversions(names, reverse, partial(rename_source_key, reverse=True))


def _loaded_conversions(model: PreTrainedModel, names: Iterable[str]) -> list[Conversion]:
    """From the files' names to the model's, of weights that it has."""
    model_has, prefix = model.state_dict(), model.base_model_prefix

    def rename(name: str, renamings: list[WeightRenaming], converters: list[WeightConverter]) -> Renamed:
        found = rename_source_key(name, renamings, converters, prefix, model_has)
        keeps_name = found[0] not in model_has and name in model_has
        return rename_source_key(name, [], [], prefix, model_has) if keeps_name else found

    used: Any = model._weight_conversions
    found = _conversions(names, used, rename)
    return [each for each in found if each.target in model_has]


def _conversions(
    names: Iterable[str],
    transforms: Iterable[WeightTransform],
    rename: Callable[[str, list[WeightRenaming], list[WeightConverter]], Renamed],
) -> list[Conversion]:
    """transforms: WeightRenamings and WeightConverters"""
    each_of: dict[type, list[Any]] = {WeightRenaming: [], WeightConverter: []}
    for each in transforms:
        each_of[WeightConverter if isinstance(each, WeightConverter) else WeightRenaming].append(each)
    renamings, converters = each_of.values()
    of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    found: dict[str, Conversion] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename(name, renamings, converters)
        transform = WeightRenaming(name, target) if pattern is None else of_pattern[pattern]
        found.setdefault(target, Conversion(transform, target, [])).sources.append((name, pattern or name))
    return list(found.values())


class WeightFiles:
    """The files of a model on the meta device, which `read_causal_lm` has compared with it.

    To be made before its modules change: they are found again by identity, whatever wraps them or their weights.
    """

    def __init__(self, path: str, model: PreTrainedModel, key: str = "model.path") -> None:
        """Ties weights of which the files have both, and computes the buffers that no file has.

        key: of `path` in the configuration. Raises ConfigError for files that cannot be read.
        """
        self._path, self._key, self._model = path, key, model
        with readable(path, key):
            self._files = _Files(path)
            self._conversions = _loaded_conversions(model, self._files.names)
            self._tie()
        self._modules = {name: model.get_submodule(name.rpartition(".")[0]) for name in model.state_dict()}
        _compute_buffers(model)

    @torch.no_grad()
    def read(self, module: nn.Module, part: Part) -> None:
        """Fill the weights of the module, which is made of the model's modules, or of some of them.

        Raises ConfigError for files that cannot be read, and for weights that are not finite.
        """
        needed, odd = {*module.modules()}, []
        for conversion in self._conversions:
            if self._modules[conversion.target] not in needed:
                continue
            with readable(self._path, self._key), self._files.opened() as tensors:
                for name, held, values in self._found(conversion, tensors, part):
                    held.copy_(values)
                    odd += [] if is_finite(held) else [name]
                    if isinstance(layer := self._modules[name], Nf4Linear) and name.endswith(_WEIGHT):
                        layer.round_weight(held)
        refuse_odd(self._path, self._key, odd)

    def write_rounded(self, folder: Path, names: Collection[str]) -> None:
        """Write the files into the folder, with these weights of the model rounded to NF4 and held in bfloat16.

        Raises ConfigError for files that cannot be read, and for a weight that no tensor of them is by itself.
        """
        found = {each.sources[0][0]: each.target for each in self._conversions if each.renames}
        alone = {source for source, target in found.items() if target in names}
        if len(alone) < len(names) or not self._files.by_file:
            needed = "safetensors in which each linear layer has a tensor of its own"
            raise ConfigError(f"{self._key}: lora.base_dtype=nf4 needs {needed}, unlike {self._path!r}")
        for file, held in self._files.by_file.items():
            with readable(self._path, self._key), self._files.opened() as tensors:
                written = {name: rounded(tensors(name)[...]) if name in alone else tensors(name)[...] for name in held}
            save_file(written, folder / Path(file).name, {"format": "pt"})

    def _found(
        self, conversion: Conversion, tensors: Callable[[str], Any], part: Part
    ) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(name, what is held here of the weight, its values)"""

        def part_of(name: str) -> tuple[Tensor, Any]:
            module = self._modules[name]
            if isinstance(module, Nf4Linear) and name.endswith(_WEIGHT):
                return module.empty_weight(), ...
            return part(getattr(module, name.rpartition(".")[2]))

        def read(name: str) -> Tensor:
            whole: Tensor = tensors(name)[...]
            return whole

        if conversion.renames or conversion.stacks:
            held, rows = part_of(conversion.target)
            if held.numel() == 0:
                return
            if conversion.renames:
                yield conversion.target, held, tensors(conversion.sources[0][0])[rows]
            else:
                yield conversion.target, held, conversion.of_rows(rows).apply(self._model, read)[conversion.target]
            return
        for name, whole in conversion.apply(self._model, read).items():
            held, rows = part_of(name)
            yield name, held, whole[rows]

    def _tie(self) -> None:
        """transformers cannot compare the values of tied weights on the meta device, and leaves them apart there."""
        model, source_of = self._model, {each.target: each.sources[0][0] for each in self._conversions}
        for alias, name in [*model.all_tied_weights_keys.items()]:
            if model.get_parameter(alias) is model.get_parameter(name):
                continue
            with self._files.opened() as tensors:
                equal = torch.equal(tensors(source_of[alias])[...], tensors(source_of[name])[...])
            if equal:
                owner, _, attribute = alias.rpartition(".")
                setattr(model.get_submodule(owner), attribute, model.get_parameter(name))
            else:
                model.all_tied_weights_keys.pop(alias)


class _Files:
    """Tensors by name: in safetensors files, or in pickles, which torch maps into memory."""

    def __init__(self, path: str) -> None:
        self._file_of: dict[str, str] = {}
        self._loaded: dict[str, Tensor] = {}
        for file in _weight_files(path):
            if file.endswith(".safetensors"):
                with safe_open(file, "pt") as tensors:
                    self._file_of |= dict.fromkeys(tensors.keys(), file)
            else:
                self._loaded |= load_state_dict(file)

    @property
    def names(self) -> list[str]:
        return [*self._file_of, *self._loaded]

    @property
    def by_file(self) -> dict[str, list[str]]:
        """The names of each file of safetensors."""
        return {file: [name for name, each in self._file_of.items() if each == file] for file in self._file_of.values()}

    @contextmanager
    def opened(self) -> Iterator[Callable[[str], Any]]:
        """name -> what gives the tensor's rows for a slice of them, and all of it for `...`

        Files are mapped into memory until the end of the block, so that what was read does not add up.
        """
        with ExitStack() as stack:
            files: dict[str, Any] = {}

            def find(name: str) -> Any:
                if name in self._loaded:
                    return self._loaded[name]
                file = self._file_of[name]
                if file not in files:
                    files[file] = stack.enter_context(safe_open(file, "pt"))
                return files[file].get_slice(name)

            yield find


def _weight_files(path: str) -> list[str]:
    """As transformers chooses them."""
    for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME):
        if (file := cached_file(path, name, _raise_exceptions_for_missing_entries=False)) is None:
            continue
        return get_checkpoint_shard_files(path, file)[0] if name.endswith(".json") else [file]
    raise FileNotFoundError(f"no {SAFE_WEIGHTS_NAME}")


def _compute_buffers(model: PreTrainedModel) -> None:
    """Buffers that are not stored, such as frequencies of rotary embeddings, as transformers computes them.

    A module may compute those of modules in it, so that all are initialized once more: on the meta device, without
    values for weights.
    """
    module: Any
    for module in model.modules():
        module._is_hf_initialized = False
        for name in module._non_persistent_buffers_set:
            module._buffers[name] = torch.empty_like(module.get_buffer(name), device="cpu")
    model.initialize_weights()
