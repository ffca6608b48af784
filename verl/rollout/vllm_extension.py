"""What vLLM's worker processes do for us: say who they are, read published weights, put them into the model.

A publication is one safetensors file that holds every distinct tensor once, under its digest, and in its metadata the
name of every weight with the digest of its tensor. Tied weights and equal tensors so travel once. The worker hashes
what it read, not what it was told: vLLM repacks weights and drops the originals, so this is the last place where they
can be compared with the sender's.

This file runs where vLLM runs; the engine imports it for the file's format alone.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from blake3 import blake3
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_LOOK_S = 2.0  # between looks for the owner


def digest(tensor: Tensor) -> str:
    """A hash of dtype, shape and bytes of a contiguous CPU tensor."""
    kind = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    content = tensor.flatten().view(torch.uint8).numpy().data  # a memoryview
    return blake3(kind, max_threads=blake3.AUTO).update(content).hexdigest()


def write_weights(path: Path, digests: Mapping[str, str], tensors: dict[str, Tensor]) -> None:
    """Write `tensors` (by digest) and `digests` (by name of the weight) as one publication."""
    save_file(tensors, path, metadata={"digests": json.dumps(dict(digests))})


def read_weights(path: str) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every weight of a publication, in the sender's order."""
    with safe_open(path, framework="pt") as file:
        for name, key in json.loads(file.metadata()["digests"]).items():
            yield name, file.get_tensor(key)


class WeightReceiver:
    """Mixed into vLLM's worker class (`worker_extension_cls`); its methods are called by `collective_rpc`."""

    if TYPE_CHECKING:  # vLLM's worker has these
        model_runner: Any
        vllm_config: VllmConfig

    def follow(self, owner: str) -> int:
        """The worker's process, for the engine to watch and to end. From now on it ends if process `owner` does.

        vLLM's processes outlive an owner that is killed; so that they do not hold memory for ever, each worker looks
        for the owner and takes vLLM's engine core, its parent, with it.
        """
        threading.Thread(target=_end_with, args=(int(owner), os.getpid(), os.getppid()), daemon=True).start()
        return os.getpid()

    def receive_weights(self, path: str) -> tuple[dict[str, str], list[str]]:
        """Digests of the weights as they arrived here, by name, and the names that this worker's model needs."""
        model = self.model_runner.get_model()
        return {name: digest(tensor) for name, tensor in read_weights(path)}, sorted(checkpoint_names(model))

    def apply_weights(self, path: str) -> list[str]:
        """Load a publication into the model in place; returns the parameters that it left out, which must be none."""
        from vllm.config import set_current_vllm_config

        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            return reload_in_place(self.model_runner.get_model(), self.vllm_config, read_weights(path))


def _end_with(owner: int, *own: int) -> None:
    while psutil.pid_exists(owner):
        time.sleep(_LOOK_S)
    for pid in reversed(own):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def checkpoint_names(model: nn.Module) -> set[str]:
    """The names, in transformers' spelling, of the weights that fill a vLLM model, tied aliases included.

    vLLM fuses weights of a layer (q, k and v into qkv) and says so in `packed_modules_mapping`.
    """
    parts: Mapping[str, Sequence[str]] = model.packed_modules_mapping  # type: ignore[assignment]
    names = set()
    for name, _ in model.named_parameters(remove_duplicate=False):
        layer, _, leaf = name.rpartition(".")
        parent, _, module = layer.rpartition(".")
        names |= {f"{parent}.{part}.{leaf}" for part in parts[module]} if module in parts else {name}
    return names


def reload_in_place(model: nn.Module, config: VllmConfig, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Load weights layer by layer and repack each; names of the parameters that were not loaded.

    Plain `load_weights` fails on CPU, where loaded weights have been repacked and the originals emptied. While a layer
    waits for its weights it has parameters of its own, so a head that was tied must be loaded as well; releases of vLLM
    in which the head is the very module of the embedding (0.24) skip its name, hence the look at identity.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    initialize_layerwise_reload(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    loaded: set[str] = model.load_weights(weights)  # type: ignore[operator]
    finalize_layerwise_reload(model, config.model_config)

    def place(name: str) -> tuple[int, str]:
        layer, _, leaf = name.rpartition(".")
        return id(modules[layer]), leaf

    places = {place(name) for name in loaded}
    return sorted(name for name in names if place(name) not in places)
