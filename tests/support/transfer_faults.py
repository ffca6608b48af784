"""Faults of a weight transfer, injected one at a time into any transport, and counted by whether they are noticed.

A campaign sends weights again and again. Between a sender and its receiver one fault changes a bucket's content, its
label, or how often it comes. The receiver either raises an EngineError or it does not. A second receiver takes the same
buckets without any check: only where its tensors differ from those that were sent has there been a fault at all.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from tests.support.weight_sync import filled
from verl.errors import EngineError
from verl.transfer.bucket import BucketHandle, BucketLayout, BucketSender, Receiver, TensorSlice, plan

Weights = Mapping[str, Tensor]


class Target(Protocol):
    """The receiving end of a weight sync. Each method raises EngineError for a fault that it notices."""

    def begin(self, layouts: Sequence[BucketLayout]) -> None:
        """A weight sync of these buckets starts."""

    def load(self, layout: BucketLayout, handle: BucketHandle) -> None:
        """Take one bucket."""

    def end(self) -> None:
        """Every bucket was sent."""

    def tensors(self) -> Weights:
        """What it has now, by name."""


class Received:
    """What every engine takes weights with: the product's own `Receiver`, on the CPU."""

    def __init__(self) -> None:
        self.receiver = Receiver(torch.device("cpu"))
        self._tensors: dict[str, Tensor] = {}

    def begin(self, layouts: Sequence[BucketLayout]) -> None:
        self.receiver.begin(layouts)

    def load(self, layout: BucketLayout, handle: BucketHandle) -> None:
        flat = self.receiver.receive(layout, [handle])
        self._tensors |= {name: view.clone() for name, view in layout.named(flat)}

    def end(self) -> None:
        self.receiver.end()

    def tensors(self) -> Weights:
        return self._tensors


@dataclass
class Transit:
    """A bucket between sender and receiver.

    flat: its memory, which the handle refers to; old, old_message: the same bucket in the weight sync before this one
    messages: what the receiver gets of it; again: after all buckets
    others: contents of all buckets of this weight sync; announced: their layouts, as the receiver has them
    """

    flat: Tensor
    messages: list[tuple[BucketLayout, BucketHandle]]
    old: Tensor
    old_message: tuple[BucketLayout, BucketHandle]
    others: Sequence[Tensor]
    announced: Sequence[BucketLayout]
    again: Sequence[tuple[BucketLayout, BucketHandle]] = ()

    @property
    def layout(self) -> BucketLayout:
        return self.messages[0][0]

    @property
    def memory(self) -> Tensor:
        """[num_bytes]"""
        return self.flat.view(torch.uint8)

    def relabel(self, *slices: TensorSlice) -> None:
        """The message has other slices in place of those of the same memory."""
        by_start = {each.start: each for each in slices}
        changed = tuple(by_start.get(each.start, each) for each in self.layout.slices)
        self.messages = [(replace(self.layout, slices=changed), self.messages[0][1])]


Fault = Callable[[Transit, random.Random], object]


def _range(transit: Transit, source: random.Random, step: int = 1) -> slice:
    """Bytes of the bucket, at multiples of `step`: a few, or up to all."""
    length = len(transit.memory) // step
    start = source.randrange(length)
    size = min(source.choice((1, 2, 16, 128, length)), length - start)
    return slice(step * start, step * (start + source.randint(1, size)))


def _flip(transit: Transit, source: random.Random) -> None:
    for _ in range(source.choice((1, 1, 2, 3, 8))):
        transit.memory[source.randrange(len(transit.memory))] ^= 1 << source.randrange(8)


def _flip_alike(transit: Transit, source: random.Random) -> None:
    """The same bit of several numbers, such as their signs: in plain sums they cancel."""
    size = source.choice((2, 4, 8))
    numbers, bit = transit.memory.view(-1, size), source.randrange(8)
    start, last = source.randrange(len(numbers)), len(numbers) - 1
    for place in {start, *(min(start + source.randrange(64), last) for _ in range(source.choice((1, 1, 3, 31))))}:
        numbers[place, -1] ^= 1 << bit


def _noise(transit: Transit, source: random.Random) -> None:
    place = _range(transit, source)
    transit.memory[place] = torch.tensor(list(source.randbytes(place.stop - place.start)), dtype=torch.uint8)


def _zeros(transit: Transit, source: random.Random) -> None:
    transit.memory[_range(transit, source)] = 0


def _exchanged_numbers(transit: Transit, source: random.Random) -> None:
    """Two of 2 to 8 bytes, or groups of up to 64, near each other or not."""
    numbers = transit.memory.view(-1, source.choice((2, 4, 8, 16, 64)))
    first, last = source.randrange(len(numbers)), len(numbers) - 1
    second = source.choice((min(first + source.randint(1, 8), last), source.randint(0, last)))
    numbers[[first, second]] = numbers[[second, first]]


def _pair(transit: Transit, source: random.Random) -> tuple[TensorSlice, TensorSlice] | None:
    """Two slices of one shape; None if there are none in this bucket."""
    slices = transit.layout.slices
    pairs = [(a, b) for number, a in enumerate(slices) for b in slices[:number] if a.shape == b.shape]
    return source.choice(pairs) if pairs else None


def _exchanged_tensors(transit: Transit, source: random.Random) -> None:
    if (pair := _pair(transit, source)) is not None:
        views = {each.start: view.reshape(-1) for each, view in transit.layout.unpack(transit.flat)}
        one, other = (views[each.start] for each in pair)
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)


def _exchanged_names(transit: Transit, source: random.Random) -> None:
    if (pair := _pair(transit, source)) is not None:
        one, other = pair
        transit.relabel(replace(one, names=other.names), replace(other, names=one.names))


def _other_shape(transit: Transit, source: random.Random) -> None:
    each = source.choice(transit.layout.slices)
    transit.relabel(replace(each, shape=each.shape[::-1]))


def _other_dtype(transit: Transit, source: random.Random) -> None:
    layout, handle = transit.messages[0]
    other = {torch.bfloat16: torch.float16, torch.float32: torch.int32}[layout.dtype]
    transit.messages = [(replace(layout, dtype=other), handle)]


def _wrong_offset(transit: Transit, source: random.Random) -> None:
    """A tensor is read from another place of the bucket, or all of it is shifted."""
    if source.random() < 0.5:
        transit.memory.copy_(transit.memory.roll(source.choice((1, 2, 4, 8, 64, 512)) * source.choice((-1, 1))))
        return
    each = source.choice(transit.layout.slices)
    last = transit.layout.numel - each.start - _numel(each)
    moved = replace(each, start=source.randint(0, each.start + last))
    slices = tuple(moved if other is each else other for other in transit.layout.slices)
    transit.messages = [(replace(transit.layout, slices=slices), transit.messages[0][1])]


def _numel(each: TensorSlice) -> int:
    return torch.Size(each.shape).numel()


def _stale_slice(transit: Transit, source: random.Random) -> None:
    """One tensor, or some bytes, are those of the weight sync before."""
    if source.random() < 0.5:
        place = _range(transit, source)
        transit.memory[place] = transit.old.view(torch.uint8)[place]
        return
    each = source.choice(transit.layout.slices)
    tensor = slice(each.start, each.start + _numel(each))
    transit.flat[tensor] = transit.old[tensor]


def _truncated(transit: Transit, source: random.Random) -> None:
    """The write ended early: what follows is zero, or what the memory had before."""
    place = source.randrange(len(transit.memory))
    rest = transit.old.view(torch.uint8) if source.random() < 0.5 else torch.zeros_like(transit.memory)
    transit.memory[place:] = rest[place:]


def _late(transit: Transit, source: random.Random) -> None:
    """The bucket of the weight sync before, whole, under its own label or that of the new one."""
    layout, handle = transit.old_message
    transit.flat.copy_(transit.old)
    transit.messages = [(layout if source.random() < 0.5 else transit.layout, handle)]


def _dropped(transit: Transit, source: random.Random) -> None:
    transit.messages = []


def _twice(transit: Transit, source: random.Random) -> None:
    """Once more at the end, when its memory may have been used again."""
    transit.again = transit.messages


def _other_bucket(transit: Transit, source: random.Random) -> None:
    """The memory has been overwritten by another bucket."""
    other = source.choice(transit.others)
    size = min(len(other), len(transit.flat))
    transit.flat[:size] = other[:size]


def _other_label(transit: Transit, source: random.Random) -> None:
    """The bucket comes as another one of the weight sync."""
    others = [each for each in transit.announced if each.numel <= transit.layout.numel]
    transit.messages = [(source.choice(others), transit.messages[0][1])]


FAULTS: Mapping[str, Fault] = {
    "flipped bits": _flip,
    "one bit flipped in several numbers": _flip_alike,
    "random bytes": _noise,
    "zeros": _zeros,
    "exchanged numbers": _exchanged_numbers,
    "exchanged tensors": _exchanged_tensors,
    "exchanged names": _exchanged_names,
    "another shape": _other_shape,
    "another dtype": _other_dtype,
    "a wrong offset": _wrong_offset,
    "a stale slice": _stale_slice,
    "a truncated tail": _truncated,
    "a late bucket": _late,
    "a dropped bucket": _dropped,
    "a bucket twice": _twice,
    "another bucket's content": _other_bucket,
    "another bucket's label": _other_label,
}
LABELS = ("exchanged names", "another shape", "a wrong offset")  # may be in the announcement, too


@dataclass
class Outcome:
    """Faults by kind. harmless: the tensors were those sent, all the same; so it was none"""

    noticed: Counter[str] = field(default_factory=Counter)
    unnoticed: Counter[str] = field(default_factory=Counter)
    harmless: Counter[str] = field(default_factory=Counter)

    @property
    def count(self) -> int:
        """Of real faults."""
        return self.noticed.total() + self.unnoticed.total()


@dataclass
class Campaign:
    """Weight syncs with a fault each.

    versions: weights of equal names and shapes, sent in turn; dtype, bucket_bytes: of the buckets
    """

    open_sender: Callable[[], BucketSender]
    target: Target
    versions: Sequence[Weights]
    dtype: torch.dtype
    bucket_bytes: int
    seed: int = 0

    def __post_init__(self) -> None:
        self._layouts = plan(self.versions[0].items(), self.dtype, self.bucket_bytes)
        self._sender = self.open_sender()
        self._last = self._sent(0)
        assert _equal(self.target.tensors(), self._cast(0)), "without a fault the weights arrive"

    def run(self, count: int) -> Outcome:
        """Inject until there were `count` real faults, of all kinds in turn."""
        source, outcome, number = random.Random(self.seed), Outcome(), 0
        while outcome.count < count:
            kind = list(FAULTS)[number % len(FAULTS)]
            number += 1
            noticed, changed = self._inject(kind, number, source)
            counted = outcome.harmless if not changed else outcome.noticed if noticed else outcome.unnoticed
            counted[kind] += 1
        return outcome

    def _cast(self, version: int) -> Weights:
        return {name: each.detach().to(self.dtype) for name, each in self._weights(version).items()}

    def _weights(self, version: int) -> Weights:
        return self.versions[version % len(self.versions)]

    def _of(self, version: int) -> list[BucketLayout]:
        return [replace(each, version=version) for each in self._layouts]

    def _sent(self, version: int) -> list[tuple[BucketLayout, BucketHandle, Tensor]]:
        """A weight sync without a fault. Returns every bucket's layout, handle and content."""
        layouts, sent = self._of(version), []
        self.target.begin(layouts)
        for layout in layouts:
            flat = filled(layout, self._sender, self._weights(version))
            handle = self._sender.send(layout, flat)
            self.target.load(layout, handle)
            sent.append((layout, handle, flat.clone()))
        self.target.end()
        return sent

    def _inject(self, kind: str, version: int, source: random.Random) -> tuple[bool, bool]:
        """Whether the target noticed, and whether tensors of an unchecked receiver differ from those sent."""
        layouts, place = self._of(version), source.randrange(len(self._layouts))
        contents = [filled(each, self._sender, self._weights(version)).clone() for each in layouts]
        announced = list(layouts)
        if kind in LABELS and source.random() < 0.5:  # the receiver's own list has the fault, too
            announced[place] = self._mislabeled(kind, layouts[place], source)
        unchecked, receiver = dict(self._cast(version - 1)), Receiver(torch.device("cpu"))
        again: Sequence[tuple[BucketLayout, BucketHandle]] = ()

        def arrive(message: tuple[BucketLayout, BucketHandle]) -> bool:
            layout, handle = message
            taken = handle.take(layout, receiver)
            assert taken is not None
            unchecked.update((name, view.clone()) for name, view in layout.named(taken.view(layout.dtype)))
            return noticed or not _passes(lambda: self.target.load(layout, handle))

        noticed = not _passes(lambda: self.target.begin(announced))
        for number, layout in enumerate(layouts):
            flat = filled(layout, self._sender, self._weights(version))
            handle = self._sender.send(layout, flat)
            old_layout, old_handle, old = self._last[number]
            transit = Transit(flat, [(announced[number], handle)], old, (old_layout, old_handle), contents, layouts)
            if number == place and announced[number] == layout:
                FAULTS[kind](transit, source)
            again = [*again, *transit.again]
            for each in transit.messages:
                noticed = arrive(each)
        for each in again:
            noticed = arrive(each)
        noticed = noticed or not _passes(self.target.end)
        changed = not _equal(unchecked, self._cast(version))
        self._last = self._sent(version)  # the next fault meets a target with the weights of this version
        return noticed, changed

    def _mislabeled(self, kind: str, layout: BucketLayout, source: random.Random) -> BucketLayout:
        flat = torch.zeros(layout.numel, dtype=self.dtype)
        transit = Transit(flat, [(layout, self._last[0][1])], flat, (layout, self._last[0][1]), [flat], [layout])
        FAULTS[kind](transit, source)
        return transit.layout


def _passes(work: Callable[[], object]) -> bool:
    try:
        work()
    except EngineError:
        return False
    return True


def _equal(found: Weights, sent: Weights) -> bool:
    """To the last bit: NaN equals itself, and zero is not minus zero."""
    return found.keys() == sent.keys() and all(
        found[name].shape == each.shape
        and found[name].dtype == each.dtype
        and torch.equal(found[name].contiguous().view(torch.uint8), each.contiguous().view(torch.uint8))
        for name, each in sent.items()
    )
