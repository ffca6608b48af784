"""Weight buckets: their layout, the handles that describe them, and how an engine receives one.

A weight sync is a sequence of buckets, so that neither side holds more than two of them besides its own copy of the
model: the trainer gathers the next one while an engine loads the last. A bucket is one flat tensor of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import torch
from blake3 import blake3
from torch import Tensor

from verl.errors import EngineError
from verl.units import MIB

NUM_SLOTS = 2  # buckets alive at once
BUCKET_BYTES = 256 * MIB
_INT_BYTES = 8  # the digest sums int64
_ROW = 64  # int64 values per sum


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """One tensor in a bucket."""

    names: tuple[str, ...]  # a tied weight has several
    shape: tuple[int, ...]
    start: int  # in elements of the bucket


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """The tensors of one bucket and their offsets."""

    number: int  # position of the bucket in its weight sync
    dtype: torch.dtype
    slices: tuple[TensorSlice, ...]
    numel: int  # a multiple of the digest's row; elements after the last slice are padding

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def slot(self) -> int:
        """Index of its buffer; buffers are used in turn."""
        return self.number % NUM_SLOTS

    def unpack(self, flat: Tensor) -> Iterator[tuple[TensorSlice, Tensor]]:
        """Every slice as a view of `flat` [numel]."""
        for each in self.slices:
            yield each, flat[each.start : each.start + prod(each.shape)].view(each.shape)

    def named(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(name, view of `flat`) of every weight, tied aliases included."""
        for each, view in self.unpack(flat):
            for name in each.names:
                yield name, view


def plan(named: Iterable[tuple[str, Tensor]], dtype: torch.dtype, bucket_bytes: int) -> list[BucketLayout]:
    """Buckets of at most `bucket_bytes` in the order given; a larger weight has its own bucket.

    named: (name, tensor); a tensor with several names is stored once
    """
    named = list(named)  # keeps the tensors alive: the id of a freed one could be reused
    names: dict[int, list[str]] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
    shapes = {id(tensor): tuple(tensor.shape) for _, tensor in named}
    room = bucket_bytes // dtype.itemsize
    buckets: list[list[TensorSlice]] = [[]]
    end = 0
    for key, shape in shapes.items():
        if end and end + prod(shape) > room:
            buckets.append([])
            end = 0
        buckets[-1].append(TensorSlice(tuple(names[key]), shape, end))
        end += prod(shape)
    sized = ((tuple(slices), _whole_rows(slices, dtype)) for slices in buckets)
    return [BucketLayout(number, dtype, *each) for number, each in enumerate(sized)]


def all_names(layouts: Iterable[BucketLayout]) -> list[str]:
    return [name for layout in layouts for each in layout.slices for name in each.names]


def _whole_rows(slices: Sequence[TensorSlice], dtype: torch.dtype) -> int:
    end = max((each.start + prod(each.shape) for each in slices), default=0)
    row = _ROW * _INT_BYTES // dtype.itemsize
    return -(-end // row) * row


def digest(flat: Tensor) -> str:
    """Checksum of a bucket, computed on its device, and the same on every device.

    Integer sums of rows of 512 bytes, then a hash of the sums: one pass at memory bandwidth, and a GPU copies 1/64 of
    the bucket to the host instead of all of it. Detects any fault that changes a row's sum: flipped bits, lost, stale
    and misplaced blocks. Does not protect against deliberate tampering.
    """
    sums = flat.view(torch.int64).view(-1, _ROW).sum(1).cpu()
    return blake3(sums.numpy().tobytes()).hexdigest()


@dataclass(frozen=True)
class Receiver:
    """An engine's end of the transport, in the process that loads the weights.

    kept: resources that outlive a bucket (mapped memory, a communicator), by a key that the handle's class chooses
    """

    device: torch.device
    kept: dict[str, Any] = field(default_factory=dict)

    def receive(self, layout: BucketLayout, handles: Sequence[BucketHandle]) -> Tensor:
        """The bucket as it was sent. Its memory is reused soon, so the caller must copy what it keeps.

        Raises EngineError if the checksum differs, or if no handle is meant for this device.
        """
        for handle in handles:
            if (flat := handle.take(layout, self)) is not None:
                if digest(flat) != handle.digest:
                    names = all_names([layout])
                    raise EngineError(f"checksum mismatch in weight bucket {layout.number} ({names[0]} .. {names[-1]})")
                return flat
        raise EngineError(f"weight bucket {layout.number}: no handle for device {self.device}")


class BucketHandle(Protocol):
    """A bucket in transit to an engine. Small and picklable, unless the transport carries the tensors themselves."""

    @property
    def digest(self) -> str:
        """Checksum of the bucket as it was sent."""

    def take(self, layout: BucketLayout, receiver: Receiver) -> Tensor | None:
        """[numel] the bucket; None if the handle is meant for another device than the receiver's."""


class BucketSender(Protocol):
    """A trainer rank's end of a transport."""

    def buffer(self, layout: BucketLayout) -> Tensor:
        """[numel] memory to fill with the bucket; overwrites the bucket `NUM_SLOTS` before it."""

    def send(self, layout: BucketLayout, flat: Tensor) -> BucketHandle:
        """Send the filled `buffer`."""

    def release(self) -> None:
        """The weight sync is over: free the memory that the next one can allocate again."""


OpenSender = Callable[[], BucketSender] | None  # makes a rank's sender, in its process; None: the rank sends nothing
