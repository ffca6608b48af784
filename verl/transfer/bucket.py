"""Weights in buckets: what lies where, what is told of each, and how one is taken on the other side.

A publication is a sequence of buckets, so that neither side holds more of the model than two of them besides its own
copy: the trainer gathers the next while an engine loads the last. A bucket is one flat tensor of weights end to end.
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

NUM_SLOTS = 2  # buckets alive at once
_WORD = 8  # bytes; of what the digest sums
_ROW = 64  # words


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """One tensor in a bucket."""

    names: tuple[str, ...]  # a tied weight has several
    shape: tuple[int, ...]
    start: int  # in elements of the bucket


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """What lies where in one bucket."""

    number: int  # of the bucket in its publication
    dtype: torch.dtype
    pieces: tuple[TensorSlice, ...]
    numel: int  # whole rows of the digest; what is behind the last piece means nothing

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def slot(self) -> int:
        """Which of the memories that are used in turn."""
        return self.number % NUM_SLOTS

    def unpack(self, flat: Tensor) -> Iterator[tuple[TensorSlice, Tensor]]:
        """Every piece as a view of `flat` [numel]."""
        for piece in self.pieces:
            yield piece, flat[piece.start : piece.start + prod(piece.shape)].view(piece.shape)

    def named(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(name, view of `flat`) of every weight, tied aliases included."""
        for piece, view in self.unpack(flat):
            for name in piece.names:
                yield name, view


def plan(named: Iterable[tuple[str, Tensor]], dtype: torch.dtype, bucket_bytes: int) -> list[BucketLayout]:
    """Buckets of at most `bucket_bytes` in the order given; a weight that is larger has one of its own.

    named: (name, tensor); the same tensor under several names is held once
    """
    named = list(named)  # a tensor that nobody holds could leave its id to the next
    names: dict[int, list[str]] = {}
    shapes: dict[int, tuple[int, ...]] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
        shapes[id(tensor)] = tuple(tensor.shape)
    room = bucket_bytes // dtype.itemsize
    buckets: list[list[TensorSlice]] = [[]]
    end = 0
    for key, shape in shapes.items():
        if end and end + prod(shape) > room:
            buckets.append([])
            end = 0
        buckets[-1].append(TensorSlice(tuple(names[key]), shape, end))
        end += prod(shape)
    return [
        BucketLayout(number, dtype, tuple(pieces), _whole_rows(pieces, dtype)) for number, pieces in enumerate(buckets)
    ]


def all_names(layouts: Iterable[BucketLayout]) -> list[str]:
    """The names of all weights of a publication."""
    return [name for layout in layouts for piece in layout.pieces for name in piece.names]


def _whole_rows(pieces: Sequence[TensorSlice], dtype: torch.dtype) -> int:
    end = max((piece.start + prod(piece.shape) for piece in pieces), default=0)
    row = _ROW * _WORD // dtype.itemsize
    return -(-end // row) * row


def digest(flat: Tensor) -> str:
    """A hash of a bucket, computed where it lies, and the same on every device.

    Integer sums of rows of 512 bytes, then a hash of the sums: one pass at the speed of memory, and a GPU hands out
    1/64 of the bucket instead of all of it. It finds any fault that changes a row's sum: flipped bits, lost, stale and
    misplaced blocks. It does not withstand someone who alters weights on purpose.
    """
    sums = flat.view(torch.int64).view(-1, _ROW).sum(1).cpu()
    return blake3(sums.numpy().tobytes()).hexdigest()


@dataclass(frozen=True)
class Receiver:
    """An engine's end, in the process that loads the weights.

    kept: what outlives a bucket (mapped memory, a communicator), under keys of the offers' own
    """

    device: torch.device
    kept: dict[str, Any] = field(default_factory=dict)

    def receive(self, layout: BucketLayout, offers: Sequence[BucketHandle]) -> Tensor:
        """The bucket as it was sent; its memory is used again soon, so whoever keeps a part of it must copy.

        Raises EngineError if it was altered on its way, or if no offer can be taken on this device.
        """
        for offer in offers:
            flat = offer.take(layout, self)
            if flat is not None:
                if digest(flat) != offer.digest:
                    names = all_names([layout])
                    raise EngineError(
                        f"bucket {layout.number} of the weights ({names[0]} to {names[-1]}) is not as it was sent"
                    )
                return flat
        raise EngineError(f"bucket {layout.number} of the weights was not offered to device {self.device}")


class BucketHandle(Protocol):
    """A bucket on its way to an engine. Small and picklable, unless the transport is to carry tensors themselves."""

    @property
    def digest(self) -> str:
        """Of the bucket as it was sent."""

    def take(self, layout: BucketLayout, receiver: Receiver) -> Tensor | None:
        """[numel] the bucket; None if it is meant for another device than the receiver's."""


class BucketSender(Protocol):
    """A trainer rank's end of a transport."""

    def buffer(self, layout: BucketLayout) -> Tensor:
        """[numel] where to put the bucket; the bucket `NUM_SLOTS` before it is overwritten."""

    def offer(self, layout: BucketLayout, flat: Tensor) -> BucketHandle:
        """Offer what `buffer` gave, now that it is filled."""

    def release(self) -> None:
        """The publication is over: give back what the next one need not find warm."""


OpenSender = (
    Callable[[], BucketSender] | None
)  # makes a rank's outlet, in its process; None for a rank that offers nothing
