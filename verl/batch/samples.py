"""Converts scored trajectories to samples. The tokens sampled by the engine are the trained tokens, unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from verl.batch.token_batch import Bools, Floats, Ints, TokenBatch
from verl.types import Completion, Score, TrajectoryGroup, Turn

_UNKNOWN = float("nan")  # the engine's log-prob of a token it did not sample


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One token sequence for training; L tokens, of which A are trained. The mask is not shifted."""

    token_ids: Ints  # [L]
    action_mask: Bools  # [L] True where the policy sampled the token
    rollout_logprobs: Floats  # [A] the engine's, of the trained tokens; NaN for observations, which it did not sample
    group: int  # group id; shared by the samples of one prompt
    reward: float  # reward of the episode, assigned to the last trained token


def to_batch(groups: Sequence[TrajectoryGroup], train_on_observations: bool = False) -> TokenBatch:
    """The batch of a step: a sample per segment of every trajectory with turns, groups numbered in their order.

    A sample has the tokens of the segment's turns in order; completions are trained. With `train_on_observations`
    observation tokens are trained, too; the prompt, and the context with which a segment begins, never are. An episode
    has one reward, on the last trained token of all its samples. E: episodes, T: turns of all samples.
    """
    scored = [
        (segments, number, reward, score)
        for number, group in enumerate(groups)
        for trajectory, reward, score in zip(group.trajectories, group.rewards, group.scores, strict=True)
        if (segments := trajectory.segments)
    ]
    samples = list(chain.from_iterable(segments for segments, *_ in scored))
    turns = list(chain.from_iterable(samples))
    first = _starts(np.array([len(each) for each in samples], dtype=np.int64))  # turn of each sample
    samples_E = np.array([len(segments) for segments, *_ in scored], dtype=np.int64)
    groups_E = np.array([number for _, number, *_ in scored], dtype=np.int64)
    context_T = np.array([len(turn.context_ids) for turn in turns], dtype=np.int64)
    written_T = np.array([len(turn.completion.token_ids) for turn in turns], dtype=np.int64)
    observed_T = np.full(len(turns), train_on_observations)
    observed_T[first] = False
    untrained_T = np.where(observed_T, 0, context_T)
    trained_T = context_T + written_T - untrained_T
    baselines = [groups[number].baseline for _, number, *_ in scored]
    rewards_T = np.array([turn.reward or 0.0 for turn in turns], dtype=np.float32)
    rewards_E = np.array([reward for _, _, reward, _ in scored], dtype=np.float32)
    num_trained = np.add.reduceat(trained_T, first)
    return TokenBatch(
        token_ids=_flat([ids for turn in turns for ids in (turn.context_ids, turn.completion.token_ids)], np.int32),
        action_mask=np.repeat(np.tile([False, True], len(turns)), np.stack([untrained_T, trained_T], axis=1).ravel()),
        num_tokens=np.add.reduceat(context_T + written_T, first),
        num_trained=num_trained,
        groups=groups_E.repeat(samples_E),
        episodes=None if len(samples) == len(scored) else np.arange(len(scored)).repeat(samples_E),
        rollout_logprobs=_flat(list(_logprobs(turns, observed_T.tolist())), np.float32),
        rewards=_at_ends(rewards_T, trained_T) + _at_ends(rewards_E, np.add.reduceat(num_trained, _starts(samples_E))),
        baselines=None if None in baselines else np.array(baselines, dtype=np.float32).repeat(samples_E),
        parts=_parts([score for *_, score in scored], samples_E),
    )


def _parts(scores: Sequence[Score], samples_E: Ints) -> npt.NDArray[np.void] | None:
    """[B] the parts of the scores, 0 where a score lacks one; None without any."""
    names = dict.fromkeys(name for score in scores for name in score.parts)
    rows = [tuple(score.parts.get(name, 0.0) for name in names) for score in scores]
    return np.array(rows, dtype=[(name, np.float32) for name in names]).repeat(samples_E) if names else None


def _starts(counts: Ints) -> Ints:
    return np.cumsum(counts) - counts


def _logprobs(turns: Sequence[Turn], observed: Sequence[bool]) -> Iterator[Sequence[float]]:
    """The engine's log-probs of the trained tokens, in pieces."""
    for turn, trained in zip(turns, observed, strict=True):
        if trained:
            yield (_UNKNOWN,) * len(turn.context_ids)
        yield turn.completion.logprobs


def sample_from_completion(
    prompt_ids: Sequence[int], completion: Completion, group_id: int = 0, reward: float = 0.0
) -> Sample:
    token_ids = _flat([prompt_ids, completion.token_ids], np.int32)
    mask, logprobs = np.arange(len(token_ids)) >= len(prompt_ids), _flat([completion.logprobs], np.float32)
    return Sample(token_ids=token_ids, action_mask=mask, rollout_logprobs=logprobs, group=group_id, reward=reward)


def batch_of(samples: Sequence[Sample], baselines: Floats | None = None) -> TokenBatch:
    """The samples as flat arrays. baselines: [B] reward of the greedy response to each sample's prompt"""
    num_trained = np.array([len(sample.rollout_logprobs) for sample in samples], dtype=np.int64)
    return TokenBatch(
        token_ids=_flat([sample.token_ids for sample in samples], np.int32),
        action_mask=_flat([sample.action_mask for sample in samples], np.bool_),
        num_tokens=np.array([len(sample.token_ids) for sample in samples], dtype=np.int64),
        num_trained=num_trained,
        groups=np.array([sample.group for sample in samples], dtype=np.int64),
        rollout_logprobs=_flat([sample.rollout_logprobs for sample in samples], np.float32),
        rewards=_at_ends(np.array([sample.reward for sample in samples], dtype=np.float32), num_trained),
        baselines=baselines,
    )


def _at_ends(rewards: Floats, num_trained: Ints) -> Floats:
    """[A] every reward on the last of its trained tokens; without one it is dropped. num_trained: per reward"""
    rewards_A, some = np.zeros(int(num_trained.sum()), dtype=np.float32), num_trained > 0
    rewards_A[np.cumsum(num_trained)[some] - 1] = rewards[some]
    return rewards_A


def _flat(pieces: Sequence[Sequence[float] | npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    if {getattr(piece, "typecode", None) for piece in pieces} == {np.dtype(dtype).char}:
        return np.frombuffer(bytearray().join(pieces), dtype)  # type: ignore[arg-type]  # in half of the time
    # Arrays of the standard library are views here; numpy itself would look for elements before it finds their buffer.
    arrays = [np.asarray(piece) for piece in pieces if len(piece)]
    return np.concatenate(arrays, dtype=dtype, casting="same_kind") if arrays else np.empty(0, dtype=dtype)
