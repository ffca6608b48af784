"""Chooses the rollouts of a step whose tokens are kept, and collects what is known about them.

Chosen are rollouts from the lowest to the highest reward of groups from the lowest to the highest mean reward, so that
one can compare within a group and between groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from toolrl.analysis.samples.sample_files import COLUMNS, MAX_BYTES, KeptSample, LossScale, StepSamples
from verl.algorithms.algorithm import Algorithm
from verl.batch.token_batch import Floats, TokenBatch
from verl.batch.trace import Trace
from verl.trainer.learner import Learned
from verl.types import Trajectory, TrajectoryGroup, Turn

# What exceeds this has no chance to fit into a file (`MAX_BYTES`), whatever it compresses to, and is not collected.
_MAX_RAW_BYTES = 4 * MAX_BYTES
_TOKEN_BYTES, _VALUE_BYTES = 9, 4


@dataclass(frozen=True, slots=True)
class ChosenSample:
    """A segment of a chosen rollout. row: in the batch of the step"""

    row: int
    group: int
    rollout: int  # place in the group
    segment: int
    turns: tuple[Turn, ...]


def choose_rollouts(groups: Sequence[TrajectoryGroup], limit: int) -> list[ChosenSample]:
    """The samples of at most `limit` rollouts; in the order of the batch of these groups (`to_batch`)."""
    if not groups or not limit:
        return []
    size = max(len(group.trajectories) for group in groups)
    num_groups = min(len(groups), max(math.isqrt(limit), limit // size))
    by_mean = sorted(range(len(groups)), key=lambda number: float(np.mean(groups[number].returns or (0.0,))))
    chosen = {
        (number, rollout)
        for number in _evenly_spaced(by_mean, num_groups)
        for rollout in _by_reward(groups[number], limit // num_groups)
    }
    return [each for each in _samples(groups) if (each.group, each.rollout) in chosen]


def _by_reward(group: TrajectoryGroup, count: int) -> list[int]:
    returns = group.returns
    return _evenly_spaced(sorted(range(len(returns)), key=lambda rollout: returns[rollout]), count)


def _evenly_spaced(items: Sequence[int], count: int) -> list[int]:
    """`count` of the items at equal distances, the first and the last among them."""
    places = np.linspace(0, len(items) - 1, min(count, len(items))).round().astype(int)
    return [items[place] for place in places.tolist()]


def _samples(groups: Sequence[TrajectoryGroup]) -> Iterator[ChosenSample]:
    """All samples of the groups, in the order of `to_batch`."""
    row = 0
    for number, group in enumerate(groups):
        for rollout, trajectory in enumerate(group.trajectories):
            for segment, turns in enumerate(trajectory.segments):
                yield ChosenSample(row, number, rollout, segment, turns)
                row += 1


def step_samples(
    groups: Sequence[TrajectoryGroup],
    logged: Sequence[TrajectoryGroup],
    chosen: Sequence[ChosenSample],
    outcome: Learned,
    trace: Trace,
    scale: LossScale | None = None,
) -> StepSamples:
    """groups: those of the batch; logged: those of the step's transcript, which filters may have dropped in part"""
    lines = {id(trajectory): line for line, trajectory in enumerate(_trajectories(logged))}
    tokens, trained = outcome.batch.bounds.tokens, outcome.batch.bounds.trained
    samples: list[KeptSample] = []
    lengths = tokens[1:] - tokens[:-1]
    left = _MAX_RAW_BYTES
    for each in sorted(chosen, key=lambda each: int(lengths[each.row])):
        span, actions = slice(*tokens[each.row : each.row + 2]), slice(*trained[each.row : each.row + 2])
        columns = {**_columns(outcome, actions), **trace.tokens.get(each.row, {})}
        left -= _TOKEN_BYTES * (span.stop - span.start) + _VALUE_BYTES * sum(map(len, columns.values()))
        if left < 0:  # no room for this or any longer sample
            break
        group = groups[each.group]
        trajectory = group.trajectories[each.rollout]
        samples.append(
            KeptSample(
                row=each.row,
                line=lines.get(id(trajectory)),
                task_id=group.task.id,
                group=each.group,
                index=trajectory.index,
                segment=each.segment,
                num_segments=len(trajectory.segments),
                reward=group.rewards[each.rollout],
                group_returns=group.returns,
                baseline=group.baseline,
                token_ids=outcome.batch.token_ids[span],
                mask=outcome.batch.action_mask[span],
                versions=_versions(each.turns),
                columns=columns,
            )
        )
    left_out = len(chosen) - len(samples)
    samples.sort(key=lambda sample: sample.row)
    return StepSamples(
        samples=samples,
        loss=trace.loss,
        sums=trace.sums,
        scale=scale,
        whitening=outcome.batch.whitening,
        left_out=left_out,
    )


def loss_scale(batch: TokenBatch, algorithm: Algorithm, minibatches: int) -> LossScale:
    """batch: of the step, with the samples that the updates do not compute, but count"""
    return LossScale(
        aggregation=algorithm.aggregation.value,
        length=algorithm.aggregation_length,
        minibatches=minibatches,
        num_trained=batch.num_trained,
        groups=batch.groups,
        episodes=np.arange(len(batch)) if batch.episodes is None else batch.episodes,
        observation_coefficient=algorithm.observation_coefficient,
    )


def _trajectories(groups: Sequence[TrajectoryGroup]) -> Iterator[Trajectory]:
    return (trajectory for group in groups for trajectory in group.trajectories)


def _versions(turns: Sequence[Turn]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """[L] the weight version of each token; -1 for context and observations."""
    pieces = [piece for turn in turns for piece in ((-1,) * len(turn.context_ids), turn.completion.versions)]
    return np.concatenate([np.asarray(piece, dtype=np.int64) for piece in pieces])


def _columns(outcome: Learned, actions: slice) -> dict[str, Floats]:
    names = [each.name for each in fields(outcome.batch) if each.name in COLUMNS]
    columns = {name: getattr(outcome.batch, name) for name in names}
    return {name: each[actions] for name, each in columns.items() if each is not None}
