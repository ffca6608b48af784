"""Sequence packing: token-balanced, without padding, shared prompts stored once.

    TokenBatch --units--> rows with one prefix --assign--> packs of at most max_tokens --shard--> a Shard for every rank
    on the rank: Shard --pack--> PackedBatch

GRPO trains n responses per prompt; ordinary packing computes the prompt n times. Here a unit stores it once, and every
response attends to it and to itself. Packing without prefix sharing has one sample per unit. What follows the last
input of a sample (`TokenBatch.num_inputs`), such as its last token, is not computed.

Segments of an episode do not all begin alike: a context may repeat a part of an earlier segment, responses included, or
only the prompt. There a group becomes several units, by what the samples have in common. Such a prefix may have trained
tokens: hidden states are the same in every sample that begins with them. A unit has one prefix, so a context that grows
from segment to segment is still computed more than once.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, islice, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from verl.batch.packed import PackedBatch, Segment
from verl.batch.token_batch import Bools, Floats, Ints, TokenBatch
from verl.errors import ConfigError


class Unit(NamedTuple):
    """Samples (by row of the batch) that share their first `prefix` tokens."""

    samples: tuple[int, ...]
    prefix: int
    num_tokens: int  # the prefix once, plus the remaining tokens of each sample; at most that many are packed


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's share of a batch, and the packs that it computes.

    The samples are in the order of the packs: values of the packs' trained tokens, one pack after the other, are values
    of the batch's.
    """

    batch: TokenBatch
    packs: Sequence[Sequence[Unit]]

    def __len__(self) -> int:
        return len(self.packs)

    def __iter__(self) -> Iterator[PackedBatch]:
        """The packs, each built when its turn comes."""
        return (pack(units, self.batch) for units in self.packs)

    def parts(self) -> Iterator[TokenBatch]:
        """The samples of each pack."""
        bounds, ends = self.batch.bounds, [0]
        for units in self.packs:
            ends.append(ends[-1] + sum(len(unit.samples) for unit in units))
            yield self.batch.rows(np.arange(*ends[-2:]), bounds)


def make_units(batch: TokenBatch, share_prefix: bool, max_tokens: int) -> list[Unit]:
    """One unit per group of samples with a common prefix before their first trained tokens; splits oversized groups.

    With episodes of several segments: units of the samples of a group that begin with the same tokens, trained or not.
    Raises ConfigError if a single sample has more than max_tokens.
    """
    lengths: list[int] = batch.num_tokens.tolist()
    if too_long := next((length for length in lengths if length > max_tokens), 0):
        raise ConfigError(
            f"a sample has {too_long} tokens, but a pack holds {max_tokens}; "
            "raise max_tokens_per_pack or lower the prompt or response length"
        )
    if not share_prefix:
        return [Unit((row,), 0, length) for row, length in enumerate(lengths)]
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(batch.groups.tolist()):
        groups.setdefault(group, []).append(row)
    parts = [groups[group] for group in sorted(groups)]
    if batch.episodes is None:
        tokens = _heads(batch)
    else:
        tokens = [batch.token_ids[low:high] for low, high in pairwise(batch.bounds.tokens.tolist())]
        parts = [part for members in parts for part in _by_prefix(members, tokens)]
    return [unit for members in parts for unit in _split(members, lengths, tokens, max_tokens)]


def _by_prefix(members: Sequence[int], tokens: Sequence[Ints]) -> list[list[int]]:
    """The members in parts that have a long prefix in common.

    In sorted order samples that begin alike are neighbors. The tree of their common prefixes is visited from the
    longest ones: n samples become a part if (n - 1) * prefix >= n * (what they have in common with others), so that
    they save at least as many tokens as in any larger part. Together the parts save at least as many as a single unit.
    """
    order = sorted(members, key=lambda row: tokens[row].tobytes())
    common = [_common_length([tokens[one], tokens[other]]) for one, other in pairwise(order)]
    parts: list[list[int]] = []
    open_nodes: list[tuple[int, list[int]]] = [(0, [])]  # (prefix, rows in no part), from the shortest prefix
    for row, after in zip(order, [*common, 0], strict=True):  # after: tokens in common with the next row
        if after > open_nodes[-1][0]:
            open_nodes.append((after, []))
        open_nodes[-1][1].append(row)
        while open_nodes[-1][0] > after:
            prefix, rows = open_nodes.pop()
            if open_nodes[-1][0] < after:
                open_nodes.append((after, []))
            shorter, outside = open_nodes[-1]
            if rows and (len(rows) - 1) * prefix >= len(rows) * shorter:
                parts.append(rows)
            else:
                outside += rows
    return [*parts, *([row] for row in open_nodes[0][1])]


def _heads(batch: TokenBatch) -> list[Ints]:
    """[B] the tokens before the first trained one; all where none is trained."""
    samples = zip(pairwise(batch.bounds.tokens.tolist()), batch.num_trained.tolist(), strict=True)
    return [
        batch.token_ids[low : low + int(batch.action_mask[low:high].argmax()) if trained else high]
        for (low, high), trained in samples
    ]


def _split(members: list[int], lengths: Sequence[int], tokens: Sequence[Ints], max_tokens: int) -> list[Unit]:
    """Units of the members' common prefix. tokens: [B] those that a sample may share"""
    if len(members) == 1:
        return [Unit((members[0],), 0, lengths[members[0]])]
    prefix = _common_length([tokens[row] for row in members])
    units: list[Unit] = []
    taken: list[int] = []
    num_tokens = prefix
    for row in members:
        own = lengths[row] - prefix
        if taken and num_tokens + own > max_tokens:
            units.append(Unit(tuple(taken), prefix, num_tokens))
            taken, num_tokens = [], prefix
        taken.append(row)
        num_tokens += own
    return [*units, Unit(tuple(taken), prefix, num_tokens)]


def _common_length(sequences: Sequence[Ints]) -> int:
    """Tokens that all sequences begin with."""
    first, *others = sequences
    length = min(map(len, sequences))
    start = first[:length].tobytes()
    for other in others:
        if other[:length].tobytes() != start:  # compared as bytes in a tenth of the time
            length = int((first[:length] != other[:length]).argmax())
            start = first[:length].tobytes()
    return length


def assign(units: Sequence[Unit], max_tokens: int, num_ranks: int = 1) -> list[list[Unit]]:
    """Distributes units over packs of at most max_tokens, largest first; num_ranks divides the number of packs.

    Every rank must run the same number of packs, because each involves collectives; packs may be empty.
    """
    num_packs = max(1, math.ceil(sum(unit.num_tokens for unit in units) / max_tokens))
    num_packs = math.ceil(num_packs / num_ranks) * num_ranks
    largest_first = sorted(units, key=lambda unit: -unit.num_tokens)
    while (packs := _deal(largest_first, num_packs, max_tokens)) is None:
        num_packs += num_ranks * max(1, num_packs // (64 * num_ranks))  # for thousands, a few attempts suffice
    return packs


def _deal(units: Sequence[Unit], num_packs: int, max_tokens: int) -> list[list[Unit]] | None:
    packs: list[list[Unit]] = [[] for _ in range(num_packs)]
    loads = [(0, number) for number in range(num_packs)]
    for unit in units:
        load, number = loads[0]
        if load + unit.num_tokens > max_tokens:
            return None
        packs[number].append(unit)
        heapq.heapreplace(loads, (load + unit.num_tokens, number))
    return packs


@dataclass(frozen=True, slots=True)
class Sharding:
    """A batch and its packs: those of rank r are r, r + num_ranks, .., so that a rank has whole units."""

    batch: TokenBatch
    packs: Sequence[Sequence[Unit]]
    num_ranks: int

    def shards(self) -> Iterator[Shard]:
        """Every rank's shard in turn, each copied when it is sent, without what only the advantages needed."""
        needed, bounds = replace(self.batch, hint_ids=None, num_hints=None), self.batch.bounds
        if needed.advantages is not None:
            needed = replace(needed, rewards=None, baselines=None, parts=None, teacher_logprobs=None)
        for rank in range(self.num_ranks):
            yield Shard(needed.rows(self._rows(rank), bounds), _renumbered(self._packs(rank)))

    def gathered(self, by_rank: Sequence[Floats]) -> Floats:
        """[A] the ranks' values of their trained tokens, in the order of the batch."""
        return self.batch.spread((self._rows(rank), values) for rank, values in enumerate(by_rank))

    def gathered_top(self, by_rank: Sequence[npt.NDArray[np.void]]) -> npt.NDArray[np.void]:
        """[A] as `gathered`, of `top_type`."""
        flat = np.zeros(int(self.batch.num_trained.sum()), dtype=by_rank[0].dtype)
        return self.batch.filled(flat, ((self._rows(rank), values) for rank, values in enumerate(by_rank)))

    def keeps_groups(self) -> bool:
        """Whether the samples of every group are in one pack."""
        rows = ([row for unit in units for row in unit.samples] for units in self.packs)
        parts = sum(len(np.unique(self.batch.groups[each])) for each in rows)
        return parts == len(np.unique(self.batch.groups))

    def _packs(self, rank: int) -> Sequence[Sequence[Unit]]:
        return self.packs[rank :: self.num_ranks]

    def _rows(self, rank: int) -> Ints:
        return np.fromiter(chain.from_iterable(unit.samples for unit in chain(*self._packs(rank))), dtype=np.int64)


def _renumbered(packs: Sequence[Sequence[Unit]]) -> list[list[Unit]]:
    """The units with rows counted from 0 in their order, which is that of the shard's samples."""
    numbers = count()
    return [[unit._replace(samples=tuple(islice(numbers, len(unit.samples)))) for unit in units] for units in packs]


def pack(units: Sequence[Unit], batch: TokenBatch) -> PackedBatch:
    """Concatenate the units' tokens, with the fields of the batch at their trained tokens.

    Asserts that no sample trains its first token, which has no context.
    Without trained tokens the pack may be a single token without loss.
    """
    bounds, trained_bounds = batch.bounds.tokens.tolist(), batch.bounds.trained.tolist()
    tokens: list[Ints] = []
    positions: list[Ints] = []
    segments: list[Segment] = []
    trained, context = _Predicted([], []), _Predicted([], [])
    places: list[Ints] = []
    length = 0

    def add(ids: Ints, first_position: int, prefix: int | None) -> int:
        nonlocal length
        start, length = length, length + len(ids)
        tokens.append(ids)
        positions.append(np.arange(first_position, first_position + len(ids)))
        segments.append(Segment(start, length, prefix))
        return start

    for unit in units:
        shared_start, shared = 0, None
        if unit.prefix:
            first = bounds[unit.samples[0]]
            shared = len(segments)
            shared_start = add(batch.token_ids[first : first + unit.prefix], 0, None)
        for row in unit.samples:
            low, high = bounds[row], bounds[row + 1]
            trained_A = np.flatnonzero(batch.action_mask[low:high])
            own = batch.token_ids[low + unit.prefix : low + (int(trained_A[-1]) if len(trained_A) else 0)]
            start = add(own, unit.prefix, shared) if len(own) else 0
            assert not len(trained_A) or trained_A[0] > 0, "the first token of a sample cannot be trained"
            offsets = shared_start, start - unit.prefix
            trained.add(low, trained_A, unit.prefix, *offsets)
            if batch.nll_weights is not None:
                context_C = np.flatnonzero((batch.nll_weights[low:high] != 0.0) & ~batch.action_mask[low:high])
                assert not len(context_C) or 0 < context_C[0] <= context_C[-1] < trained_A[-1], "nothing predicts it"
                context.add(low, context_C, unit.prefix, *offsets)
            places.append(np.arange(trained_bounds[row], trained_bounds[row + 1]))
    if not tokens:
        add(np.zeros(1, dtype=np.int64), 0, None)  # an empty pack still participates in collectives
    place_A = _joined(places)
    token_AC = _joined([*trained.tokens, *context.tokens])
    sample_A = np.repeat(_joined([np.array(unit.samples) for unit in units]), list(map(len, places)))
    return PackedBatch(
        token_ids=_tensor(np.concatenate(tokens)),
        position_ids=_tensor(np.concatenate(positions)),
        segments=tuple(segments),
        source=_tensor(_joined([*trained.sources, *context.sources])),
        target=_tensor(batch.token_ids[token_AC]),
        sample=_tensor(sample_A),
        advantages=_column(batch.advantages, place_A),
        rollout_logprobs=_column(batch.rollout_logprobs, place_A),
        old_logprobs=_column(batch.old_logprobs, place_A),
        ref_logprobs=_column(batch.ref_logprobs, place_A),
        top_ids=None if batch.teacher_top is None else _tensor(batch.teacher_top["ids"][place_A]),
        top_logprobs=None if batch.teacher_top is None else _column(batch.teacher_top["logprobs"], place_A),
        values=_column(batch.values, place_A),
        returns=_column(batch.returns, place_A),
        selected=_column(batch.selected, place_A),
        loss_weights=_column(batch.loss_weights, sample_A),
        nll_weights=_column(batch.nll_weights, token_AC),
        metric_weight=batch.metric_weight,
        sampled_weight=batch.sampled_weight,
    )


class _Predicted(NamedTuple):
    """Of each sample: the packed places that predict tokens, and these tokens' places in the batch."""

    sources: list[Ints]
    tokens: list[Ints]

    def add(self, first: int, places: Ints, prefix: int, shared: int, own: int) -> None:
        """places: in the sample, whose first token is `first` in the batch; shared, own: from a place in the prefix or
        behind it to a packed one"""
        before = places - 1
        self.sources.append(np.where(before < prefix, shared, own) + before)
        self.tokens.append(first + places)


def _joined(pieces: Sequence[Ints]) -> Ints:
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)


def _tensor(integers: Ints) -> Tensor:
    return torch.from_numpy(integers.astype(np.int64))


def _column(values: Floats | Bools | None, places: Ints) -> Tensor | None:
    return None if values is None else torch.from_numpy(values[places].astype(np.float32))
