"""What vLLM's worker processes do for us: say who they are, which weights they need, and take them in buckets.

A worker checks every bucket as it arrives: vLLM repacks weights and drops the originals, so this is the last place
where they can be compared with the sender's. vLLM's reload goes layer by layer, and what of a layer has come waits for
the rest, which may lie in a later bucket: so weights are copied out of a bucket, whose memory is used again.

This file runs where vLLM runs. The GPU's transports have never been run so far.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import nn

from verl.transfer.bucket import Receiver

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_LOOK_S = 2.0  # between looks for the owner


class WeightReceiver:
    """Mixed into vLLM's worker class (`worker_extension_cls`); its methods are called by `collective_rpc`."""

    if TYPE_CHECKING:  # vLLM's worker has these
        model_runner: Any
        vllm_config: VllmConfig
        device: torch.device
        rank: int

    _inlet: Receiver
    _loaded: set[str]  # since `begin_weights`

    def follow(self, owner: str) -> int:
        """The worker's process, for the engine to watch and to end. From now on it ends if process `owner` does.

        vLLM's processes outlive an owner that is killed; so that they do not hold memory for ever, each worker looks
        for the owner and takes vLLM's engine core with it: its parent, or itself where it is the only worker.
        """
        core = [] if os.getppid() == int(owner) else [os.getppid()]
        threading.Thread(target=_end_with, args=(int(owner), os.getpid(), *core), daemon=True).start()
        return os.getpid()

    def weight_names(self) -> list[str]:
        """The names of the weights that this worker's model needs."""
        return sorted(checkpoint_names(self.model_runner.get_model()))

    def join_broadcast(self, host: str, port: int, first: int, size: int) -> None:
        """Meet the trainer for broadcasts. first: the rank there of this engine's first worker"""
        from verl.transfer.gpu import COMMUNICATOR, Rendezvous

        self._receiver().kept[COMMUNICATOR] = Rendezvous(host, port, size).join(first + self.rank)

    def begin_weights(self) -> None:
        """From now until `end_weights` the model is of no use."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._loaded = set()
        initialize_layerwise_reload(self.model_runner.get_model())

    def load_bucket(self, bucket: bytes) -> None:
        """Check a bucket and load it. bucket: its layout and the offers, pickled, for vLLM passes on plain types"""
        from vllm.config import set_current_vllm_config

        layout, offers = pickle.loads(bucket)  # noqa: S301  from this engine's owner, over its own socket
        flat = self._receiver().receive(layout, offers)
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            copies = ((name, view.clone()) for name, view in layout.named(flat))
            self._loaded |= self.model_runner.get_model().load_weights(copies)

    def end_weights(self) -> list[str]:
        """Make the model usable again; returns the parameters that were left out, which must be none."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        model = self.model_runner.get_model()
        left_out = not_loaded(model, self._loaded)
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.vllm_config.model_config)
        return left_out

    def _receiver(self) -> Receiver:
        """Made when it is needed first: vLLM mixes this class in without calling a constructor of it."""
        if not hasattr(self, "_inlet"):
            self._inlet = Receiver(self.device)
        return self._inlet


def _end_with(owner: int, *own: int) -> None:
    while _lives(owner):
        time.sleep(_LOOK_S)
    for pid in reversed(own):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _lives(pid: int) -> bool:
    """Not so a dead one whose parent never asks after it, as the first process of many a container."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


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


def not_loaded(model: nn.Module, loaded: Iterable[str]) -> list[str]:
    """Names of the parameters that were not loaded.

    While a layer waits for its weights it has parameters of its own, so a head that was tied must be loaded as well;
    releases of vLLM in which the head is the very module of the embedding (0.24) skip its name, hence the look at
    identity.
    """
    modules = dict(model.named_modules(remove_duplicate=False))

    def place(name: str) -> tuple[int, str]:
        layer, _, leaf = name.rpartition(".")
        return id(modules[layer]), leaf

    places = {place(name) for name in loaded}
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return sorted(name for name in names if place(name) not in places)
