"""Transports through CPU memory: shared between processes of one machine, or sent to others."""

import os
import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from verl.errors import EngineError
from verl.transfer.bucket import NUM_SLOTS, BucketLayout, Receiver, digest


@dataclass(frozen=True, slots=True)
class InMemory:
    """A handle that holds the bucket itself."""

    flat: Tensor
    digest: str

    def __reduce__(self) -> tuple[Any, ...]:
        """Through an array, which pickle can leave where it is."""
        return _in_memory, (self.flat.view(torch.uint8).numpy(), self.flat.dtype, self.digest)

    def take(self, layout: BucketLayout, receiver: Receiver) -> Tensor | None:
        return self.flat


def _in_memory(content: npt.NDArray[np.uint8], dtype: torch.dtype, sent_digest: str) -> InMemory:
    return InMemory(torch.from_numpy(content).view(dtype), sent_digest)


class ByValue:
    """Buckets that their handles bring along, to engines on any node."""

    def buffer(self, layout: BucketLayout) -> Tensor:
        return torch.empty(layout.numel, dtype=layout.dtype)

    def send(self, layout: BucketLayout, flat: Tensor) -> InMemory:
        return InMemory(flat, digest(layout, flat))

    def release(self) -> None:
        """No-op: nothing is kept."""


@dataclass(frozen=True, slots=True)
class SharedFile:
    """Handle of a bucket in shared memory, written by another process of this machine."""

    path: str
    owner: str  # unique id of the writer, because the path of a deleted file may be reused
    num_bytes: int  # size of the file
    digest: str

    def take(self, layout: BucketLayout, receiver: Receiver) -> Tensor | None:
        file = (self.owner, self.num_bytes)
        if self.path not in receiver.kept or receiver.kept[self.path][0] != file:
            receiver.kept[self.path] = (file, map_file(self.path, self.num_bytes))
        memory: Tensor = receiver.kept[self.path][1]
        return memory[: layout.num_bytes].view(layout.dtype)


class SharedMemory:
    """Buckets in anonymous memory files, which vanish with the last process that uses them, even a killed one.

    Other processes of the machine open them through /proc. Both sides keep them from one weight sync to the next:
    the first touch of fresh memory costs several times as much as the copy.
    """

    def __init__(self) -> None:
        self._id = secrets.token_hex(8)
        self._files = [os.memfd_create("verl-weights") for _ in range(NUM_SLOTS)]
        self._memory = [torch.empty(0, dtype=torch.uint8)] * NUM_SLOTS

    def buffer(self, layout: BucketLayout) -> Tensor:
        if len(self._memory[layout.slot]) < layout.num_bytes:
            os.ftruncate(self._files[layout.slot], layout.num_bytes)
            self._memory[layout.slot] = map_file(self._path(layout.slot), layout.num_bytes)
        return self._memory[layout.slot][: layout.num_bytes].view(layout.dtype)

    def send(self, layout: BucketLayout, flat: Tensor) -> SharedFile:
        return self.relay(layout, digest(layout, flat))

    def relay(self, layout: BucketLayout, sent_digest: str) -> SharedFile:
        """Send a copy of a bucket from another sender, with that sender's digest."""
        return SharedFile(self._path(layout.slot), self._id, len(self._memory[layout.slot]), sent_digest)

    def release(self) -> None:
        """No-op: the files are kept for the next weight sync."""

    def __del__(self) -> None:
        for file in self._files:
            os.close(file)

    def _path(self, slot: int) -> str:
        return f"/proc/{os.getpid()}/fd/{self._files[slot]}"


def map_file(path: str, num_bytes: int) -> Tensor:
    """[num_bytes] the file's content, shared. Raises EngineError if this process cannot open it."""
    try:
        return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise EngineError(
            f"cannot open the shared memory of the weights ({error}); trainer and engine must run on one machine, "
            "in one container and as one user"
        ) from error
