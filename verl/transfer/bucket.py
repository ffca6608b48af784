"""Weight buckets: their layout, the handles that describe them, and how an engine receives one.

A weight sync is a sequence of buckets, so that neither side holds more than two of them besides its own copy of the
model: the trainer gathers the next one while an engine loads the last. A bucket is one flat tensor of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from verl.errors import EngineError
from verl.units import MIB

NUM_SLOTS = 2  # buckets alive at once
BUCKET_BYTES = 256 * MIB
_ROW_BYTES = 512  # per sum of the digest
_INT = torch.int32  # what a row is made of, for the digest
_FACTORS = torch.from_numpy(  # random, and odd, so that every flip of one bit counts
    np.frombuffer(blake3(b"weight bucket").digest(_ROW_BYTES // _INT.itemsize * 8), np.int64) | 1
)
_ROWS = 4096  # multiplied at once: the products take twice the memory of the rows


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
    version: int = 0  # of the weights

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
    row = _ROW_BYTES // dtype.itemsize
    return -(-end // row) * row


def digest(layout: BucketLayout, flat: Tensor) -> str:
    """Checksum of a bucket with its layout and version, computed on its device, and the same on every device.

    A hash of the layout and of a sum per row of 512 bytes: its 32-bit integers times fixed random factors, modulo 2^64.
    A GPU copies 1/64 of the bucket to the host. A fault changes the sum of a row that it changes, but for a share of at
    most 2^-32: flipped bits, lost, stale and exchanged numbers. Does not protect against deliberate tampering.
    """
    rows, factors = flat.view(_INT).view(-1, len(_FACTORS)), _FACTORS.to(flat.device)
    sums = torch.cat([each.long().mul_(factors).sum(1) for each in rows.split(_ROWS)]).cpu()
    return blake3(repr(layout).encode() + sums.numpy().tobytes()).hexdigest()


@dataclass(frozen=True)
class Receiver:
    """An engine's end of the transport, in the process that loads the weights: `begin`, every bucket once, `end`.

    kept: resources that outlive a bucket (mapped memory, a communicator), by a key that the handle's class chooses
    """

    device: torch.device
    kept: dict[str, Any] = field(default_factory=dict)
    _due: dict[int, BucketLayout] = field(default_factory=dict)  # buckets that have not arrived

    def begin(self, layouts: Iterable[BucketLayout]) -> None:
        """A weight sync of these buckets starts."""
        self._due.clear()
        self._due.update((each.number, each) for each in layouts)

    def receive(self, layout: BucketLayout, handles: Sequence[BucketHandle]) -> Tensor:
        """The bucket as it was sent. Its memory is reused soon, so the caller must copy what it keeps.

        Raises EngineError if the bucket is not due, the checksum differs, or no handle is meant for this device.
        """
        if self._due.pop(layout.number, None) != layout:
            raise EngineError(f"{_described(layout)} is not due: it came twice, or is none of this weight sync")
        for handle in handles:
            if (flat := handle.take(layout, self)) is not None:
                if digest(layout, flat) != handle.digest:
                    raise EngineError(f"checksum mismatch in {_described(layout)}")
                return flat
        raise EngineError(f"{_described(layout)}: no handle for device {self.device}")

    def end(self) -> None:
        """Raises EngineError if a bucket is missing."""
        if self._due:
            others = f", and {len(self._due) - 1} others" if len(self._due) > 1 else ""
            raise EngineError(f"{_described(self._due[min(self._due)])} is missing{others}")


def _described(layout: BucketLayout) -> str:
    names = all_names([layout])
    return f"weight bucket {layout.number} ({names[0]} .. {names[-1]}) of version {layout.version}"


class BucketHandle(Protocol):
    """A bucket in transit to an engine. Small and picklable, unless it holds the tensors themselves."""

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
