"""Converts scored trajectories to samples. The tokens sampled by the engine are the trained tokens, unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from verl.batch.token_batch import Bools, Floats, Ints, TokenBatch
from verl.types import Completion, Message, TrajectoryGroup, Turn

_UNKNOWN = float("nan")  # the engine's log-prob of a token it did not sample


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One token sequence for training; L tokens, of which A are trained. The mask is not shifted."""

    token_ids: Ints  # [L]
    action_mask: Bools  # [L] True where the policy sampled the token
    rollout_logprobs: Floats  # [A] the engine's, of the trained tokens; NaN for observations, which it did not sample
    group: int  # group id; shared by the samples of one prompt
    reward: float  # reward of the episode, assigned to the last trained token
    turn_rewards: tuple[tuple[int, float], ...] = ()  # (last token of a turn, reward for that turn), in addition


def to_batch(groups: Sequence[TrajectoryGroup], train_on_observations: bool = False) -> TokenBatch:
    """The batch of a step: the samples of all groups, numbered in their order."""
    by_group = (to_samples(group, number, train_on_observations) for number, group in enumerate(groups))
    samples = list(chain.from_iterable(by_group))
    baselines = [groups[sample.group].baseline for sample in samples]
    return batch_of(samples, None if None in baselines else np.array(baselines, dtype=np.float32))


def to_samples(group: TrajectoryGroup, group_id: int, train_on_observations: bool = False) -> list[Sample]:
    """One sample per trajectory with at least one turn."""
    scored = zip(group.trajectories, group.rewards, strict=True)
    return [
        sample_from_turns(trajectory.turns, group_id, reward, train_on_observations)
        for trajectory, reward in scored
        if trajectory.turns
    ]


def sample_from_turns(
    turns: Sequence[Turn], group_id: int = 0, reward: float = 0.0, train_on_observations: bool = False
) -> Sample:
    """The tokens of all turns in order; completions are trained. `reward` is the episode's.

    With `train_on_observations` observation tokens are trained, too; the prompt never is.
    """
    token_ids: list[Sequence[int]] = []
    logprobs: list[Sequence[float]] = []
    written: list[tuple[int, int]] = []  # trained ranges
    turn_rewards: list[tuple[int, float]] = []
    length = 0
    for number, turn in enumerate(turns):
        context, completion = turn.context_ids, turn.completion
        observed = train_on_observations and number > 0
        start, middle = length, length + len(context)
        length = middle + len(completion.token_ids)
        token_ids += (context, completion.token_ids)
        written.append((start if observed else middle, length))
        if observed:
            logprobs.append((_UNKNOWN,) * len(context))
        logprobs.append(completion.logprobs)
        if turn.reward is not None:
            turn_rewards.append((length - 1, turn.reward))
    action_mask = np.zeros(length, dtype=np.bool_)
    for start, end in written:
        action_mask[start:end] = True
    return Sample(
        token_ids=_flat(token_ids, np.int32),
        action_mask=action_mask,
        rollout_logprobs=_flat(logprobs, np.float32),
        group=group_id,
        reward=reward,
        turn_rewards=tuple(turn_rewards),
    )


def sample_from_completion(
    prompt_ids: Sequence[int], completion: Completion, group_id: int = 0, reward: float = 0.0
) -> Sample:
    """The sample of a prompt and its completion."""
    return sample_from_turns([Turn(prompt_ids, completion, Message("assistant", ""))], group_id, reward)


def batch_of(samples: Sequence[Sample], baselines: Floats | None = None) -> TokenBatch:
    """The samples as flat arrays. baselines: [B] reward of the greedy response to each sample's prompt"""
    action_mask = _flat([sample.action_mask for sample in samples], np.bool_)
    num_tokens = np.array([len(sample.token_ids) for sample in samples], dtype=np.int64)
    num_trained = np.array([len(sample.rollout_logprobs) for sample in samples], dtype=np.int64)
    return TokenBatch(
        token_ids=_flat([sample.token_ids for sample in samples], np.int32),
        action_mask=action_mask,
        num_tokens=num_tokens,
        num_trained=num_trained,
        groups=np.array([sample.group for sample in samples], dtype=np.int64),
        rollout_logprobs=_flat([sample.rollout_logprobs for sample in samples], np.float32),
        rewards=_rewards(samples, num_trained),
        baselines=baselines,
    )


def _rewards(samples: Sequence[Sample], num_trained: Ints) -> Floats:
    """[A] the turns' rewards, and the episode's on the last trained token."""
    rewards, ends = np.zeros(int(num_trained.sum()), dtype=np.float32), np.cumsum(num_trained)
    for row, sample in enumerate(samples):
        if sample.turn_rewards:
            rewards_L = np.zeros(len(sample.token_ids), dtype=np.float32)
            for position, reward in sample.turn_rewards:
                rewards_L[position] += np.float32(reward)
            rewards[ends[row] - num_trained[row] : ends[row]] = rewards_L[np.asarray(sample.action_mask)]
    some = num_trained > 0
    rewards[ends[some] - 1] += np.array([sample.reward for sample in samples], dtype=np.float32)[some]
    return rewards


def _flat(pieces: Sequence[Sequence[float] | npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    # Arrays of the standard library are views here; numpy itself would look for elements before it finds their buffer.
    arrays = [np.asarray(piece) for piece in pieces if len(piece)]
    return np.concatenate(arrays, dtype=dtype, casting="same_kind") if arrays else np.empty(0, dtype=dtype)
