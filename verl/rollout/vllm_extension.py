"""Extension of vLLM's worker class: reports the process and the weight names, and receives weights in buckets.

A worker verifies every bucket on arrival: vLLM repacks weights and drops the originals, so they cannot be compared with
the sender's later. vLLM reloads layer by layer and may have to wait for the rest of a layer in a later bucket;
therefore weights are copied out of a bucket, whose memory is reused.

This file runs inside vLLM's processes.
"""

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
from torch import Tensor, nn

from verl.transfer.bucket import Receiver

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ADAPTER = 1  # vLLM's number of the policy's adapter
_LOOK_S = 2.0  # interval of the liveness check of the owner
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class WeightReceiver:
    """Mixed into vLLM's worker class (`worker_extension_cls`); its methods are called by `collective_rpc`."""

    if TYPE_CHECKING:  # attributes of vLLM's worker
        model_runner: Any
        vllm_config: VllmConfig
        device: torch.device
        rank: int

    _inlet: Receiver
    _adapter: dict[str, Tensor] | None  # tensors of an adapter since `begin_weights`; None: whole weights are sent
    _loaded: set[str]  # since `begin_weights`
    _tensors: dict[str, int]  # by name, the identity of a parameter before the reload, which tied ones share

    def follow(self, owner: str) -> int:
        """Returns the worker's process id, for the engine to watch. From now on the worker exits with process `owner`.

        vLLM's processes outlive a killed owner and would hold their memory forever. So each worker watches the owner
        and, when it dies, kills vLLM's engine core too: its parent, or itself if it is the only worker.
        """
        core = [] if os.getppid() == int(owner) else [os.getppid()]
        threading.Thread(target=_end_with, args=(int(owner), os.getpid(), *core), daemon=True).start()
        return os.getpid()

    def weight_names(self) -> list[str]:
        return sorted(checkpoint_names(self.model_runner.get_model()))

    def refused_attention(self) -> list[str]:
        """What the attention backends of the model's layers do not compute, by their own account."""
        modules = self.model_runner.get_model().modules()
        layers = (each for each in modules if isinstance(getattr(each, "attn_backend", None), type))  # a tower names it
        return sorted({reason for layer in layers for reason in refusals(layer)})

    def join_broadcast(self, host: str, port: int, first: int, size: int) -> None:
        """Join the trainer's broadcast group. first: rank of this engine's first worker in that group"""
        from verl.transfer.gpu import COMMUNICATOR, Rendezvous

        self._receiver().kept[COMMUNICATOR] = Rendezvous(host, port, size).join(first + self.rank)

    def begin_weights(self, buckets: bytes, of_adapter: bool = False) -> None:
        """Start a reload; the model is unusable until `end_weights`, or the adapter until `end_adapter`.

        buckets: pickled layouts of all buckets, because vLLM passes on plain types only
        """
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._receiver().begin(pickle.loads(buckets))  # noqa: S301  from this engine's owner, over its own socket
        self._adapter = {} if of_adapter else None
        if of_adapter:
            return
        model = self.model_runner.get_model()
        self._loaded = set()
        self._tensors = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
        initialize_layerwise_reload(model)

    def load_bucket(self, bucket: bytes) -> None:
        """Verify and load a bucket. bucket: pickled (layout, handles)"""
        from vllm.config import set_current_vllm_config

        layout, handles = pickle.loads(bucket)  # noqa: S301  from this engine's owner, over its own socket
        flat = self._receiver().receive(layout, handles)
        if self._adapter is not None:
            self._adapter |= {name: view.clone() for name, view in layout.named(flat)}
            return
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            copies = ((name, view.clone()) for name, view in layout.named(flat))
            self._loaded |= self.model_runner.get_model().load_weights(copies)

    def end_weights(self) -> list[str]:
        """Finish the reload; returns the parameters that were not loaded (must be empty)."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        self._receiver().end()
        model = self.model_runner.get_model()
        left_out = not_loaded(self._tensors, self._loaded)
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.vllm_config.model_config)
        return left_out

    def end_adapter(self, rank: int, alpha: float) -> list[str]:
        """Replace the adapter by what has arrived, then compare what requests will compute with to that.

        Returns the modules whose tensors are others or missing (must be empty): vLLM ignores those it does not know.
        """
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        assert self._adapter is not None
        self._receiver().end()
        manager = self.model_runner.lora_manager._adapter_manager
        mapper: Any = getattr(manager.model, "hf_to_vllm_mapper", None)
        lora = LoRAModel.from_lora_tensors(
            ADAPTER,
            self._adapter,
            PEFTHelper(rank, alpha, []),
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=mapper.get_rename_mapper() if hasattr(mapper, "get_rename_mapper") else mapper,
        )
        if not lora.loras:
            return ["any module"]
        manager.remove_adapter(ADAPTER)
        manager.add_adapter(lora)  # packs q, k and v, and scales by alpha / rank
        manager.activate_adapter(ADAPTER)
        return not_bound(lora.loras, manager.modules, manager.lora_index_to_id.index(ADAPTER))

    def _receiver(self) -> Receiver:
        """Created on first use: vLLM does not call the constructor of a mixed-in class."""
        if not hasattr(self, "_inlet"):
            self._inlet = Receiver(self.device)
        return self._inlet


def _end_with(owner: int, *own: int) -> None:
    while is_alive(owner):
        time.sleep(_LOOK_S)
    for pid in reversed(own):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """Whether a process is alive; a zombie counts as dead (PID 1 of many containers does not reap its children)."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def checkpoint_names(model: nn.Module) -> set[str]:
    """The checkpoint names (transformers' spelling) of a vLLM model's weights, tied aliases included.

    vLLM fuses weights of a layer (q, k and v into qkv) and lists them in `packed_modules_mapping`, which some models
    lack.
    """
    parts: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", None) or _FUSED
    names = set()
    for name, _ in model.named_parameters(remove_duplicate=False):
        layer, _, leaf = name.rpartition(".")
        parent, _, module = layer.rpartition(".")
        names |= {f"{parent}.{part}.{leaf}" for part in parts[module]} if module in parts else {name}
    return names


def refusals(layer: Any) -> list[str]:
    """What the backend of an attention layer does not list. vLLM's CPU build does not check: it fails at a request."""
    backend, sizes = layer.attn_backend, layer.attn_backend.get_supported_head_sizes()
    computes = {
        f"heads of size {layer.head_size} (only {', '.join(map(str, sizes))})": backend.supports_head_size(
            layer.head_size
        ),
        f"{layer.dtype}": backend.supports_dtype(layer.dtype),
        f"a KV cache in {layer.kv_cache_dtype}": backend.supports_kv_cache_dtype(layer.kv_cache_dtype),
        f"attention of type {layer.attn_type}": backend.supports_attn_type(layer.attn_type),
    }
    return [f"{backend.get_name()} does not compute {what}" for what, supported in computes.items() if not supported]


def not_bound(loras: Mapping[str, Any], modules: Mapping[str, Any], slot: int) -> list[str]:
    """Names of an adapter's modules that the model does not have, or whose buffers hold other tensors.

    loras: the adapter's tensors by vLLM's names; modules: vLLM's, with buffers of all adapters; slot: this adapter's
    """
    return sorted(name for name, lora in loras.items() if name not in modules or not _holds(modules[name], lora, slot))


def _holds(module: Any, lora: Any, slot: int) -> bool:
    lora_a, lora_b = _by_buffer(module, lora)
    for each, stacked, cut in (
        (lora_a, module.lora_a_stacked, module.slice_lora_a),
        (lora_b, module.lora_b_stacked, module.slice_lora_b),
    ):
        whole = cut(each) if module.tp_size > 1 else each
        parts = whole if isinstance(whole, list) else [whole]
        for part, buffer in zip(parts, stacked, strict=True):
            rows, columns = (0, 0) if part is None else part.shape
            own = buffer[slot, 0, :rows, :columns]
            left = buffer[slot].count_nonzero() - own.count_nonzero()  # of an earlier adapter
            if left or (part is not None and not torch.equal(own.cpu(), part.cpu())):
                return False
    return True


def _by_buffer(module: Any, lora: Any) -> tuple[Any, Any]:
    """A and B of an adapter, a part per buffer of the layer.

    vLLM divides some projections of layers with state into more outputs than their checkpoints have weights: B is
    divided by its rows, and each part has the whole A.
    """
    lora_a, lora_b = ([each] if isinstance(each, torch.Tensor) else each for each in (lora.lora_a, lora.lora_b))
    buffers = len(module.lora_b_stacked)
    if len(lora_b) == buffers:
        return lora.lora_a, lora.lora_b
    pairs: list[tuple[Any, Any]] = []
    for a, b in zip(lora_a, lora_b, strict=True):
        left = [] if b is None else b
        while len(left):
            size = module.output_sizes[len(pairs)]
            pairs.append((a, left[:size]))
            left = left[size:]
    pairs += [(None, None)] * (buffers - len(pairs))
    return [a for a, _ in pairs], [b for _, b in pairs]


def not_loaded(tensors: Mapping[str, int], loaded: Iterable[str]) -> list[str]:
    """Names of the parameters that were not loaded.

    Of tied parameters one is enough: vLLM copies what arrives into the memory that they share. Some models skip the
    name of a tied head (0.24).

    tensors: the identity of every parameter before the reload, which gives tied ones separate tensors for its duration
    """
    filled = {tensors[name] for name in loaded if name in tensors}
    return sorted(name for name, tensor in tensors.items() if tensor not in filled)
