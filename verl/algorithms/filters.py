"""Which rollouts are trained on. A filter looks at one group and says of each of its rollouts whether it stays.

Filters see rewards as they are after shaping within the group, before any penalty for length; `zero_variance` with what
an environment gave for single turns. Rollouts are dropped
before advantages are estimated: those that stay are compared with one another alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress

from verl.types import StopReason, Trajectory, TrajectoryGroup

Filter = Callable[[TrajectoryGroup], Sequence[bool]]  # [G]


def zero_variance(group: TrajectoryGroup, least_spread: float = 1e-6) -> list[bool]:
    """Nothing of a group whose rewards are all alike (DAPO's dynamic sampling, arXiv 2503.14476, section 3.2).

    Told by the spread and not by a mean of 0 or 1, which would let graded rewards without a difference through.
    """
    return _all_or_none(group, max(group.returns) - min(group.returns) > least_spread)


def accuracy(
    group: TrajectoryGroup, low: float = 0.0, high: float = 1.0, part: str | None = None, inclusive: bool = False
) -> list[bool]:
    """Nothing of a group whose mean score lies outside low .. high: too hard or too easy (ZeroTIR: 0.05 to 0.8).

    part: of the score, such as "correct"; the total if left out. inclusive: whether the bounds themselves stay
    """
    points = [score.total if part is None else score.parts.get(part, 0.0) for score in group.scores]
    mean = sum(points) / len(points)
    return _all_or_none(group, low <= mean <= high if inclusive else low < mean < high)


def grader_faults(group: TrajectoryGroup, max_share: float = 0.4) -> list[bool]:
    """Nothing of a group of whose rollouts more than `max_share` could not be scored (ZeroTIR: 0.4)."""
    num_rollouts = len(group.faults) + len(group.trajectories)
    return _all_or_none(group, len(group.faults) <= max_share * num_rollouts)


def length(group: TrajectoryGroup, max_tokens: int) -> list[bool]:
    """No rollout in which the policy wrote more than `max_tokens`."""
    return [num_written(trajectory) <= max_tokens for trajectory in group.trajectories]


def truncated(group: TrajectoryGroup) -> list[bool]:
    """No rollout that was cut off at its token budget (DAPO's overlong filtering).

    DAPO takes such responses out of the loss and lets them count in the group's mean; here they count nowhere.
    """
    return [trajectory.stop_reason is not StopReason.LENGTH for trajectory in group.trajectories]


FILTERS: Mapping[str, Callable[..., Sequence[bool]]] = {
    each.__name__: each for each in (zero_variance, accuracy, grader_faults, length, truncated)
}


def num_written(trajectory: Trajectory) -> int:
    """Tokens that the policy wrote."""
    return sum(len(turn.completion.token_ids) for turn in trajectory.turns)


def name_of(function: Callable[..., object]) -> str:
    """What a function is called, with or without settings of its own."""
    return name_of(function.func) if isinstance(function, partial) else getattr(function, "__name__", repr(function))


def passed(
    groups: Sequence[TrajectoryGroup], filters: Sequence[Filter], least: int
) -> tuple[list[TrajectoryGroup], Counter[str]]:
    """(groups with what all filters leave of them, {filter: rollouts that it dropped}).

    least: rollouts that a group needs; what is left of one with fewer goes with those that the filter dropped
    """
    left, dropped = [], Counter[str]()
    for whole in groups:
        group = whole
        for each in filters:
            if not group.trajectories:
                break
            kept = list(each(group))
            if sum(kept) < least:
                kept = [False] * len(kept)
            dropped[name_of(each)] += len(kept) - sum(kept)
            group = _chosen(group, kept)
        if group.trajectories:
            left.append(group)
    return left, dropped


def _all_or_none(group: TrajectoryGroup, stays: bool) -> list[bool]:
    return [stays] * len(group.trajectories)


def _chosen(group: TrajectoryGroup, kept: Sequence[bool]) -> TrajectoryGroup:
    return replace(
        group,
        trajectories=tuple(compress(group.trajectories, kept)),
        scores=tuple(compress(group.scores, kept)),
        rewards=tuple(compress(group.rewards, kept)),
    )
