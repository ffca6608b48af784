"""What an update computed for some of its samples, token by token, to be looked at.

Shape legend: A trained tokens of a pack or a sample, B samples.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from verl.batch.packed import PackedBatch
from verl.batch.token_batch import Floats, TokenBatch

LOSS = "loss"  # the column of a token's share of the loss
TraceTokens = Callable[[PackedBatch, Mapping[str, Tensor]], None]


@dataclass(frozen=True, slots=True)
class Trace:
    """Of samples by their number in the step (`TokenBatch.numbers`).

    loss: the share of every computed sample in the loss; together they are the loss
    tokens: the columns of the chosen samples: name -> [A]
    """

    loss: Mapping[int, float] = field(default_factory=dict)
    tokens: Mapping[int, Mapping[str, Floats]] = field(default_factory=dict)


class Tracer:
    """Collects the trace of an update from its packs, whose samples are rows of `batch`, some of them `chosen`."""

    def __init__(self, batch: TokenBatch, chosen: Container[int]) -> None:
        assert batch.numbers is not None
        self._numbers: list[int] = batch.numbers.tolist()
        self._chosen = chosen
        self._loss: dict[int, float] = {}
        self._tokens: dict[int, dict[str, Floats]] = {}

    def add(self, packed: PackedBatch, columns: Mapping[str, Tensor]) -> None:
        """The columns [A] of a pack; each of its samples is in this pack alone."""
        if not len(packed.sample):
            return
        rows, counts = torch.unique_consecutive(packed.sample, return_counts=True)
        samples = list(zip(rows.tolist(), counts.tolist(), strict=True))
        shares = torch.zeros(len(self._numbers), dtype=torch.float64, device=packed.sample.device)
        shares.index_add_(0, packed.sample, columns[LOSS].detach().double())
        total = shares.tolist()
        start = 0
        for row, count in samples:
            number = self._numbers[row]
            self._loss[number] = total[row]
            if number in self._chosen:
                own = {name: each[start : start + count].detach() for name, each in columns.items()}
                self._tokens[number] = {name: each.float().cpu().numpy() for name, each in own.items()}
            start += count

    def trace(self) -> Trace:
        return Trace(self._loss, self._tokens)


def joined_ranks(traces: Iterable[Trace]) -> Trace:
    """The trace of an update from those of its ranks, which have different samples."""
    loss: dict[int, float] = {}
    tokens: dict[int, Mapping[str, Floats]] = {}
    for trace in traces:
        loss.update(trace.loss)
        tokens.update(trace.tokens)
    return Trace(loss, tokens)


def joined_updates(traces: Iterable[Trace]) -> Trace:
    """The trace of a step from those of its updates.

    The logged loss is the mean over the updates, and so are the shares. Tokens are those of a sample's first update.
    """
    every = list(traces)
    loss: dict[int, float] = {}
    tokens: dict[int, Mapping[str, Floats]] = {}
    for trace in every:
        for number, share in trace.loss.items():
            loss[number] = loss.get(number, 0.0) + share / len(every)
        tokens = {**trace.tokens, **tokens}
    return Trace(loss, tokens)
