"""Sequence packing: token-balanced, without padding, shared prompts stored once.

    samples --units--> lists of samples with one prefix --assign--> packs of at most max_tokens --pack--> PackedBatch

GRPO trains n responses per prompt; ordinary packing computes the prompt n times. Here a unit stores it once, and every
response attends to it and to itself. Packing without prefix sharing has one sample per unit.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from verl.batch.packed import PackedBatch, Segment
from verl.errors import ConfigError
from verl.types import Sample


@dataclass(frozen=True, slots=True)
class Unit:
    """Samples (by index in the mini-batch) that share their first `prefix` tokens."""

    samples: tuple[int, ...]
    prefix: int
    num_tokens: int  # the prefix once, plus the remaining tokens of each sample


def first_action(sample: Sample) -> int:
    """Position of the first trained token; the sample's length if there is none."""
    return sample.action_mask.index(True) if True in sample.action_mask else len(sample.token_ids)


def make_units(samples: Sequence[Sample], share_prefix: bool, max_tokens: int) -> list[Unit]:
    """One unit per group of samples with a common prefix before their first trained tokens; splits oversized groups.

    Raises ConfigError if a single sample has more than max_tokens.
    """
    for sample in samples:
        if len(sample.token_ids) > max_tokens:
            raise ConfigError(
                f"a sample has {len(sample.token_ids)} tokens, but a pack holds {max_tokens}; "
                "raise max_tokens_per_pack or lower the prompt or response length"
            )
    if not share_prefix:
        return [Unit((index,), 0, len(sample.token_ids)) for index, sample in enumerate(samples)]
    in_groups = sorted(range(len(samples)), key=lambda index: samples[index].group)
    units = []
    for _, members in groupby(in_groups, key=lambda index: samples[index].group):
        units += _split(list(members), samples, max_tokens)
    return units


def _split(members: list[int], samples: Sequence[Sample], max_tokens: int) -> list[Unit]:
    if len(members) == 1:
        return [Unit((members[0],), 0, len(samples[members[0]].token_ids))]
    heads = [samples[index].token_ids[: first_action(samples[index])] for index in members]
    prefix = _common_length(heads)
    units: list[Unit] = []
    taken: list[int] = []
    num_tokens = prefix
    for index in members:
        own = len(samples[index].token_ids) - prefix
        if taken and num_tokens + own > max_tokens:
            units.append(Unit(tuple(taken), prefix, num_tokens))
            taken, num_tokens = [], prefix
        taken.append(index)
        num_tokens += own
    return [*units, Unit(tuple(taken), prefix, num_tokens)]


def _common_length(rows: Sequence[tuple[int, ...]]) -> int:
    low, high = min(rows), max(rows)  # the common prefix of the first and last in sort order is common to all
    return next(
        (place for place, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high))
    )


def assign(units: Sequence[Unit], max_tokens: int, num_ranks: int = 1) -> list[list[Unit]]:
    """Distributes units over packs of at most max_tokens, largest first; num_ranks divides the number of packs.

    Every rank must run the same number of packs, because each involves collectives; packs may be empty.
    """
    num_packs = max(1, math.ceil(sum(unit.num_tokens for unit in units) / max_tokens))
    num_packs = math.ceil(num_packs / num_ranks) * num_ranks
    while (packs := _deal(units, num_packs, max_tokens)) is None:
        num_packs += num_ranks
    return packs


def _deal(units: Sequence[Unit], num_packs: int, max_tokens: int) -> list[list[Unit]] | None:
    packs: list[list[Unit]] = [[] for _ in range(num_packs)]
    loads = [(0, number) for number in range(num_packs)]
    for unit in sorted(units, key=lambda unit: -unit.num_tokens):
        load, number = heapq.heappop(loads)
        if load + unit.num_tokens > max_tokens:
            return None
        packs[number].append(unit)
        heapq.heappush(loads, (load + unit.num_tokens, number))
    return packs


def pack(
    units: Sequence[Unit], samples: Sequence[Sample], columns: Mapping[str, Sequence[Tensor]] | None = None
) -> PackedBatch:
    """Concatenate the units' tokens.

    columns: per name one [L] tensor per sample of the mini-batch, aligned with its token_ids; only trained positions of
    the pack's own samples are kept. Asserts that no sample trains its first token, which has no context.
    Without units the pack is a single token without loss.
    """
    tokens: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    source: list[Tensor] = []
    trained: list[tuple[int, Tensor]] = []  # (sample, its trained positions)

    def add(ids: Sequence[int], first_position: int, prefix: int | None) -> int:
        start = len(tokens)
        tokens.extend(ids)
        positions.extend(range(first_position, first_position + len(ids)))
        segments.append(Segment(start, len(tokens), prefix))
        return start

    for unit in units:
        shared_start, shared = 0, None
        if unit.prefix:
            shared = len(segments)
            shared_start = add(samples[unit.samples[0]].token_ids[: unit.prefix], 0, None)
        for index in unit.samples:
            sample = samples[index]
            start = (
                add(sample.token_ids[unit.prefix :], unit.prefix, shared) if len(sample.token_ids) > unit.prefix else 0
            )
            positions_A = mask_tensor(sample.action_mask).nonzero().squeeze(-1)
            before_A = positions_A - 1
            assert not len(before_A) or before_A[0] >= 0, "the first token of a sample cannot be trained"
            source.append(torch.where(before_A < unit.prefix, shared_start, start - unit.prefix) + before_A)
            trained.append((index, positions_A))
    if not tokens:
        add([0], 0, None)  # an empty pack still participates in collectives
    return PackedBatch(
        token_ids=_integers(tokens),
        position_ids=_integers(positions),
        segments=tuple(segments),
        source=_joined(source),
        target=_joined([_integers(samples[index].token_ids)[at] for index, at in trained]),
        sample=_joined([torch.full_like(at, index) for index, at in trained]),
        columns={
            name: torch.cat([rows[index][at] for index, at in trained]) if trained else torch.empty(0)
            for name, rows in (columns or {}).items()
        },
    )


def mask_tensor(mask: Sequence[bool]) -> Tensor:
    """[L] mask of a sample; ten times faster than torch.tensor on a tuple."""
    return torch.frombuffer(bytearray(mask), dtype=torch.bool) if mask else torch.empty(0, dtype=torch.bool)


def _integers(values: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int64))


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(pieces)) if pieces else torch.empty(0, dtype=torch.long)
