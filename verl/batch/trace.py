"""What an update computed for some of its samples, token by token, to be looked at.

Shape legend: A trained tokens of a pack or a sample, B samples.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.batch.packed import PackedBatch
from verl.batch.token_batch import Floats, TokenBatch

LOSS = "loss"  # the column of a token's share of the loss
UNWEIGHTED = "unweighted"  # the same without the token's weight; only its sums are kept
TraceTokens = Callable[[PackedBatch, Mapping[str, Tensor]], None]


@dataclass(frozen=True, slots=True)
class Trace:
    """Traced samples, by their number in the step (`TokenBatch.numbers`).

    loss: the share of every computed sample in the loss; together they are the loss, but for that of observations
    sums: the token losses of every computed sample added up without their weights, once per update with the sample
    tokens: the columns of the chosen samples: name -> [A]
    """

    loss: Mapping[int, float] = field(default_factory=dict)
    sums: Mapping[int, Sequence[float]] = field(default_factory=dict)
    tokens: Mapping[int, Mapping[str, Floats]] = field(default_factory=dict)


class Tracer:
    """Collects the trace of an update from its packs, whose samples are rows of `batch`, some of them `chosen`."""

    def __init__(self, batch: TokenBatch, chosen: Container[int]) -> None:
        assert batch.numbers is not None
        self._numbers: list[int] = batch.numbers.tolist()
        self._chosen = chosen
        self._packs: list[tuple[Tensor, dict[str, Tensor]]] = []

    def add(self, packed: PackedBatch, columns: Mapping[str, Tensor]) -> None:
        """The columns [A] of a pack; each of its samples is in this pack alone. They stay on their device: the host
        need not wait for it between packs."""
        self._packs.append((packed.sample, {name: each.detach() for name, each in columns.items()}))

    def trace(self) -> Trace:
        samples = [sample for pack in self._packs for sample in self._samples(*pack)]
        totals = {number: [_sum(columns[name]) for name in (LOSS, UNWEIGHTED)] for number, columns in samples}
        return Trace(
            loss={number: share for number, (share, _) in totals.items()},
            sums={number: [plain] for number, (_, plain) in totals.items()},
            tokens={number: _kept(columns) for number, columns in samples if number in self._chosen},
        )

    def _samples(self, sample_A: Tensor, columns: Mapping[str, Tensor]) -> Iterator[tuple[int, Mapping[str, Floats]]]:
        rows, counts = torch.unique_consecutive(sample_A.cpu(), return_counts=True)
        split = {name: each.float().cpu().split(counts.tolist()) for name, each in columns.items()}
        for place, row in enumerate(rows.tolist()):
            yield self._numbers[row], {name: parts[place].numpy() for name, parts in split.items()}


def _sum(column_A: Floats) -> float:
    return float(column_A.sum(dtype=np.float64))


def _kept(columns: Mapping[str, Floats]) -> Mapping[str, Floats]:
    return {name: values for name, values in columns.items() if name != UNWEIGHTED}


def joined_ranks(traces: Iterable[Trace]) -> Trace:
    """The trace of an update from those of its ranks, which have different samples."""
    joined: tuple[dict[int, Any], ...] = ({}, {}, {})
    for trace in traces:
        for one, part in zip(joined, (trace.loss, trace.sums, trace.tokens), strict=True):
            one.update(part)
    return Trace(*joined)


def joined_updates(traces: Iterable[Trace]) -> Trace:
    """The trace of a step from those of its updates.

    The logged loss is the mean over the updates, and so are the shares. Tokens are those of a sample's first update.
    """
    every = list(traces)
    loss: dict[int, float] = {}
    sums: dict[int, list[float]] = {}
    tokens: dict[int, Mapping[str, Floats]] = {}
    for trace in every:
        for number, share in trace.loss.items():
            loss[number] = loss.get(number, 0.0) + share / len(every)
            sums.setdefault(number, []).extend(trace.sums[number])
        tokens = {**trace.tokens, **tokens}
    return Trace(loss, sums, tokens)
