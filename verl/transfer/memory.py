"""Transports through the memory of CPUs: shared between processes of one machine, or carried by the worker group."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.errors import EngineError
from verl.transfer.bucket import NUM_SLOTS, BucketLayout, Receiver, digest


@dataclass(frozen=True, slots=True)
class InMemory:
    """An offer that is the bucket itself."""

    flat: Tensor
    digest: str

    def take(self, layout: BucketLayout, receiver: Receiver) -> Tensor | None:
        return self.flat


class ByReference:
    """Buckets as plain tensors, each with memory of its own: the worker group carries them to wherever the engines are,
    and nobody here knows when they have arrived."""

    def buffer(self, layout: BucketLayout) -> Tensor:
        return torch.empty(layout.numel, dtype=layout.dtype)

    def offer(self, layout: BucketLayout, flat: Tensor) -> InMemory:
        return InMemory(flat, digest(flat))

    def release(self) -> None:
        """Nothing is kept."""


@dataclass(frozen=True, slots=True)
class SharedFile:
    """An offer in memory that another process of this machine has written."""

    path: str
    owner: str  # the writer's own mark, because the path of a file that is gone may come again
    num_bytes: int  # of the file
    digest: str

    def take(self, layout: BucketLayout, receiver: Receiver) -> Tensor | None:
        file = (self.owner, self.num_bytes)
        known, memory = receiver.kept.get(self.path, (None, None))
        if known != file:
            memory = map_file(self.path, self.num_bytes)
            receiver.kept[self.path] = (file, memory)
        flat: Tensor = memory[: layout.num_bytes].view(layout.dtype)
        return flat


class SharedMemory:
    """Buckets in files without a name, which live in memory and vanish with their last process, even a killed one.

    Other processes of the machine open them through /proc. Both sides keep them from one publication to the next:
    touching fresh memory costs several times as much as copying into it.
    """

    def __init__(self) -> None:
        self._mark = secrets.token_hex(8)
        self._files = [os.memfd_create("verl-weights") for _ in range(NUM_SLOTS)]
        self._memory = [torch.empty(0, dtype=torch.uint8)] * NUM_SLOTS

    def buffer(self, layout: BucketLayout) -> Tensor:
        if len(self._memory[layout.slot]) < layout.num_bytes:
            os.ftruncate(self._files[layout.slot], layout.num_bytes)
            self._memory[layout.slot] = map_file(self._path(layout.slot), layout.num_bytes)
        return self._memory[layout.slot][: layout.num_bytes].view(layout.dtype)

    def offer(self, layout: BucketLayout, flat: Tensor) -> SharedFile:
        return self.pass_on(layout, digest(flat))

    def pass_on(self, layout: BucketLayout, sent_digest: str) -> SharedFile:
        """Offer a copy of a bucket that others have sent, under their digest."""
        return SharedFile(self._path(layout.slot), self._mark, len(self._memory[layout.slot]), sent_digest)

    def release(self) -> None:
        """The files stay warm."""

    def __del__(self) -> None:
        for file in self._files:
            os.close(file)

    def _path(self, slot: int) -> str:
        return f"/proc/{os.getpid()}/fd/{self._files[slot]}"


def map_file(path: str, num_bytes: int) -> Tensor:
    """[num_bytes] the file's content, shared. Raises EngineError if it cannot be opened from here."""
    try:
        return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise EngineError(
            f"shared weights cannot be opened ({error}); trainer and engine must run on one machine, in one container "
            "and as one user"
        ) from error
