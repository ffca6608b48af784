"""The groups of a training step: rollouts, filters, and the groups that remain for training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.filters import name_of, num_written, passed
from verl.algorithms.overlong import Overlong
from verl.errors import VerlError
from verl.types import TrajectoryGroup


class NoTrainableGroupsError(VerlError, RuntimeError):
    """No group is left for training after faults and filters."""


@dataclass
class StepGroups:
    """All groups of a step and those that pass the filters of the algorithm; overlong penalties are applied to both.

    min_group_size: scored rollouts that a group needs, 2 where advantages are group-relative
    depth: steps by which prompts are prefetched
    """

    algorithm: Algorithm
    min_group_size: int
    depth: int = 0
    drawn: list[TrajectoryGroup] = field(default_factory=list)
    kept: list[TrajectoryGroup] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)  # per kept group, in weight versions since its start
    dropped: Counter[str] = field(default_factory=Counter)  # rollouts per filter
    resample_rounds: int = 0  # max number of prompts drawn for one slot
    reused: list[TrajectoryGroup] = field(default_factory=list)  # kept groups of earlier steps

    def add(self, group: TrajectoryGroup, attempt: int = 1, staleness: int = 0) -> TrajectoryGroup | None:
        """Add a group after reward shaping. Returns the kept part. attempt: 1 for the first prompt of a slot"""
        enough = [group] if len(group.trajectories) >= self.min_group_size else []
        kept, dropped = passed(enough, self.algorithm.filters, self.min_group_size)
        self.drawn.append(apply_overlong_penalty(group, self.algorithm.overlong))
        self.dropped.update(dropped)
        self.resample_rounds = max(self.resample_rounds, attempt)
        if not kept:
            return None
        self.kept.append(apply_overlong_penalty(kept[0], self.algorithm.overlong))
        self.staleness.append(staleness)
        return self.kept[-1]

    def add_reused(self, group: TrajectoryGroup, staleness: int) -> None:
        """Add a group that an earlier step has trained on; reused groups are added first."""
        self.kept.append(group)
        self.staleness.append(staleness)
        self.reused.append(group)

    @property
    def fresh(self) -> list[TrajectoryGroup]:
        """The kept groups that are new in this step."""
        return self.kept[len(self.reused) :]

    def check(self, faults: str = "") -> None:
        """Raises NoTrainableGroupsError if no group is kept, or if all rollouts of this step failed.

        faults: why responses could not be scored, for the message
        """
        if self.kept and any(group.trajectories for group in self.drawn):
            return
        message = f"all {len(self.drawn)} groups filtered out: none has {self.min_group_size} or more scored responses"
        if self.dropped.total():
            counts = ", ".join(f"{name} dropped {count}" for name, count in self.dropped.items())
            message += (
                f" after {self.resample_rounds} resample rounds ({counts} responses). The tasks are too hard or too "
                "easy for the policy; use others, or change algorithm.filters or algorithm.max_resample_rounds"
            )
        raise NoTrainableGroupsError("\n".join(filter(None, (message, faults))))

    def metrics(self) -> dict[str, float]:
        """Metrics of filters and overlong penalty; empty if the algorithm has neither."""
        drawn = max(1, _num_rollouts(self.drawn))
        metrics = {}
        if self.algorithm.filters:
            names = [name_of(each) for each in self.algorithm.filters]
            shares = {f"filter/{name}": self.dropped[name] / drawn for name in names}
            kept = _num_rollouts(self.fresh) / drawn
            metrics = {"filter/kept": kept, **shares, "filter/resample_rounds": float(self.resample_rounds)}
        if self.algorithm.overlong is not None:
            lengths = [num_written(each) for group in self.drawn for each in group.trajectories]
            metrics["reward/overlong_penalty"] = sum(map(self.algorithm.overlong.penalty, lengths)) / drawn
        return metrics

    def staleness_metrics(self) -> dict[str, float]:
        """Weight versions between the start of a kept group and this step: 0 is on-policy."""
        return {
            "staleness/mean": sum(self.staleness) / len(self.staleness),
            "staleness/max": float(max(self.staleness)),
            "staleness/depth": float(self.depth),
            "staleness/reused": len(self.reused) / len(self.kept),
        }


def _num_rollouts(groups: Sequence[TrajectoryGroup]) -> int:
    return sum(len(group.trajectories) for group in groups)


def apply_overlong_penalty(group: TrajectoryGroup, overlong: Overlong | None) -> TrajectoryGroup:
    if overlong is None:
        return group
    pairs = zip(group.rewards, group.trajectories, strict=True)
    return replace(group, rewards=tuple(reward + overlong.penalty(num_written(response)) for reward, response in pairs))
