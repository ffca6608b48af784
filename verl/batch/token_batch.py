"""A step's samples between rollouts and ranks, in flat arrays.

Shape legend: B samples, N tokens of all samples, A trained tokens ("A" for action).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.integer[Any]]
Floats = npt.NDArray[np.floating[Any]]
Bools = npt.NDArray[np.bool_]
_Array = TypeVar("_Array", bound="npt.NDArray[Any]")


@dataclass(frozen=True, slots=True, eq=False)
class Bounds:
    """Where each sample starts in the flat arrays of tokens and of trained tokens, and where the last one ends."""

    tokens: Ints  # [B + 1]
    trained: Ints  # [B + 1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenBatch:
    """The samples of a step, or some of them, as flat arrays: one value per token, per trained token, or per sample.

    The only thing between rollouts and ranks. A field is None until it is known, and where it is not needed. Nothing is
    stored per prompt token but the token itself and its mask.
    """

    token_ids: Ints  # [N] int32; the samples one after the other
    action_mask: Bools  # [N] the loss mask (veRL's response_mask): True where a token is trained
    num_tokens: Ints  # [B]
    num_trained: Ints  # [B]
    groups: Ints  # [B] group id; shared by the samples of one prompt
    episodes: Ints | None = None  # [B] episode id; its samples are neighbors. None: every sample is an episode
    numbers: Ints | None = None  # [B] row in the batch of the step, where updates are traced

    # From the rollouts.
    rollout_logprobs: Floats | None = None  # [A] the engine's; NaN at tokens that it did not sample (observations)
    rewards: Floats | None = None  # [A] an episode's reward on its last trained token, a turn's on the turn's last
    baselines: Floats | None = None  # [B] reward of the greedy response to each sample's prompt
    hint_ids: Ints | None = None  # [H] int32 prompts with demonstrations, of a policy that teaches itself
    num_hints: Ints | None = None  # [B] how many of these are of each sample; 0: it has none
    parts: npt.NDArray[np.void] | None = None  # [B] the parts of the episode's score, a field each

    # From the models, before the update. Without old log-probs and advantages the update computes them (`Deferred`).
    old_logprobs: Floats | None = None  # [A] of the policy
    ref_logprobs: Floats | None = None  # [A] of the reference
    teacher_logprobs: Floats | None = None  # [A] of the teacher
    teacher_top: npt.NDArray[np.void] | None = None  # [A] of its likeliest tokens, as `top_type`
    values: Floats | None = None  # [A] of the critic

    # From the algorithm.
    advantages: Floats | None = None  # [A]
    returns: Floats | None = None  # [A] targets of the critic
    whitening: tuple[float, float] | None = None  # mean and standard deviation that whitened the step's advantages
    selected: npt.NDArray[Any] | None = None  # [A] tokens that the policy loss treats differently, or their weights

    # Weights in a mini-batch. The denominators count all its samples, wherever they are computed.
    loss_weights: Floats | None = None  # [B] weight of each trained token of a sample in the loss
    nll_weights: Floats | None = None  # [N] weight of each token's -log p in the loss, trained or not; 0: not in it
    metric_weight: float = 0.0  # weight of a trained token in token means
    sampled_weight: float = 0.0  # weight of a token that the engine sampled, in means over those

    def __len__(self) -> int:
        return len(self.num_tokens)

    @property
    def bounds(self) -> Bounds:
        """Where the samples start and end; compute it once for many uses."""
        return Bounds(_bounds(self.num_tokens), _bounds(self.num_trained))

    @property
    def num_inputs(self) -> Ints:
        """[B] tokens that a forward pass needs: all before the last trained one, as nothing reads what follows."""
        bounds = self.bounds
        trained = np.append(np.flatnonzero(self.action_mask), 0)
        return np.where(self.num_trained > 0, trained[bounds.trained[1:] - 1] - bounds.tokens[:-1], 0)

    @property
    def observed(self) -> Bools:
        """[N] True at observations: tokens that are not trained, between two trained ones of their sample. Neither the
        context that a sample begins with nor what follows its last trained token is one."""
        before_N, bounds = self.action_mask.cumsum(), self.bounds.trained
        low_N, high_N = (each.repeat(self.num_tokens) for each in (bounds[:-1], bounds[1:]))
        between: Bools = (before_N > low_N) & (before_N < high_N) & ~self.action_mask
        return between

    @property
    def episode_bounds(self) -> Ints:
        """[E + 1] the first sample of each episode, and where the last one ends. The trained tokens of an episode are
        contiguous, too."""
        if self.episodes is None:
            return np.arange(len(self) + 1)
        return np.append(np.flatnonzero(np.diff(self.episodes, prepend=-1)), len(self))

    def rows(self, rows: Ints, bounds: Bounds | None = None) -> TokenBatch:
        """The samples at the given places, in that order."""
        if len(rows) == len(self) and np.array_equal(rows, np.arange(len(self))):
            return self
        bounds = self.bounds if bounds is None else bounds
        runs = _runs(rows)
        tokens, trained = _ranges(runs, bounds.tokens), _ranges(runs, bounds.trained)
        hints = [] if self.num_hints is None else _ranges(runs, _bounds(self.num_hints))
        return replace(
            self,
            token_ids=_taken(self.token_ids, tokens),
            action_mask=_taken(self.action_mask, tokens),
            num_tokens=self.num_tokens[rows],
            num_trained=self.num_trained[rows],
            groups=self.groups[rows],
            episodes=None if self.episodes is None else self.episodes[rows],
            numbers=None if self.numbers is None else self.numbers[rows],
            rollout_logprobs=_taken_if(self.rollout_logprobs, trained),
            rewards=_taken_if(self.rewards, trained),
            baselines=None if self.baselines is None else self.baselines[rows],
            hint_ids=_taken_if(self.hint_ids, hints),
            num_hints=None if self.num_hints is None else self.num_hints[rows],
            parts=None if self.parts is None else self.parts[rows],
            old_logprobs=_taken_if(self.old_logprobs, trained),
            ref_logprobs=_taken_if(self.ref_logprobs, trained),
            teacher_logprobs=_taken_if(self.teacher_logprobs, trained),
            teacher_top=_taken_if(self.teacher_top, trained),
            values=_taken_if(self.values, trained),
            advantages=_taken_if(self.advantages, trained),
            returns=_taken_if(self.returns, trained),
            selected=_taken_if(self.selected, trained),
            loss_weights=None if self.loss_weights is None else self.loss_weights[rows],
            nll_weights=_taken_if(self.nll_weights, tokens),
        )

    def spread(self, parts: Iterable[tuple[Ints, Floats]], others: Floats | None = None) -> Floats:
        """[A] values of some of the samples, as (rows, their values in that order); elsewhere `others`, or NaN."""
        bounds = self.bounds.trained
        flat = np.full(bounds[-1], np.nan, dtype=np.float32) if others is None else others.copy()
        return self.filled(flat, parts)

    def filled(self, flat: _Array, parts: Iterable[tuple[Ints, _Array]]) -> _Array:
        """[A] `flat`, in place, with values of some of the samples."""
        bounds = self.bounds.trained
        for rows, values in parts:
            start = 0
            for low, high in _ranges(_runs(rows), bounds):
                flat[low:high] = values[start : start + high - low]
                start += high - low
        return flat

    def minibatch_rows(self, num_parts: int) -> Iterator[Ints]:
        """The rows of mini-batches of whole groups, as equal in groups as possible, in the order of the groups. None is
        empty."""
        _, first, group_B = np.unique(self.groups, return_index=True, return_inverse=True)
        number_B = first.argsort().argsort()[group_B]  # by first appearance
        for low, high in pairwise(part * len(first) // num_parts for part in range(num_parts + 1)):
            rows = np.flatnonzero((low <= number_B) & (number_B < high))
            if len(rows):
                yield rows

    def __reduce__(self) -> tuple[Any, ...]:
        """Small arrays in one buffer: pickled one by one, those of a few samples cost the controller as much as all the
        rest that it does for them. Large ones are not copied."""
        columns = {field.name: getattr(self, field.name) for field in _FIELDS}
        arrays = {name: each for name, each in columns.items() if isinstance(each, np.ndarray) and not each.dtype.names}
        small = {name: each for name, each in arrays.items() if each.nbytes <= _SMALL}
        others = {name: each for name, each in columns.items() if name not in small and each is not None}
        widest_first = sorted(small.items(), key=lambda named: -named[1].itemsize)  # so that each is aligned
        layout = tuple((name, array.dtype.char, len(array)) for name, array in widest_first)
        flat = np.frombuffer(b"".join([array.data for _, array in widest_first]), dtype=np.uint8)
        return _unpickled, (flat, layout, others)


def top_type(k: int) -> np.dtype[np.void]:
    """Of a token's place: the ids of the k tokens that a model holds likeliest there, and their log-probs."""
    return np.dtype([("ids", np.int32, (k,)), ("logprobs", np.float32, (k,))])


_FIELDS = fields(TokenBatch)
_SMALL = 1 << 16  # bytes


def _unpickled(
    flat: npt.NDArray[np.uint8], layout: Sequence[tuple[str, str, int]], others: dict[str, Any]
) -> TokenBatch:
    """With arrays that are views of one buffer. layout: name, type and number of items of each"""
    arrays, start = dict(others), 0
    for name, dtype, count in layout:
        arrays[name] = np.frombuffer(flat, dtype, count, start)
        start += arrays[name].nbytes
    return TokenBatch(**arrays)


def _bounds(counts: Ints) -> Ints:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)])


def _runs(rows: Ints) -> list[tuple[int, int]]:
    """(first row, row after the last) of consecutive rows: those of a group are copied at once."""
    runs: list[tuple[int, int]] = []
    first = after = -1
    for row in rows.tolist():
        if row != after:
            runs.append((first, after))
            first = row
        after = row + 1
    return [*runs[1:], (first, after)] if first >= 0 else []


def _ranges(runs: Sequence[tuple[int, int]], bounds: Ints) -> list[tuple[int, int]]:
    return [(int(bounds[first]), int(bounds[after])) for first, after in runs]


def _taken(flat: _Array, ranges: Sequence[tuple[int, int]]) -> _Array:
    """Those ranges one after the other: a view if there is one."""
    if len(ranges) == 1:
        return flat[slice(*ranges[0])]  # type: ignore[return-value]
    return np.concatenate([flat[low:high] for low, high in ranges]) if ranges else flat[:0]  # type: ignore[return-value]


def _taken_if(flat: _Array | None, ranges: Sequence[tuple[int, int]]) -> _Array | None:
    return None if flat is None else _taken(flat, ranges)
