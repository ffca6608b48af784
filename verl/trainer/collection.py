"""What a step draws, and what of it is trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.filters import name_of, num_written, passed
from verl.algorithms.overlong import Overlong
from verl.errors import VerlError
from verl.types import TrajectoryGroup


class NoSignalError(VerlError, RuntimeError):
    """Faults and filters left nothing to train on."""


@dataclass
class StepGroups:
    """Groups as they come, those that pass the algorithm's filters beside them, both after the penalty for length.

    least: scored rollouts that a group needs; a lone one has nothing to be compared with, where an algorithm compares
    depth: steps ahead that prompts had begun
    """

    algorithm: Algorithm
    min_group_size: int
    depth: int = 0
    drawn: list[TrajectoryGroup] = field(default_factory=list)
    kept: list[TrajectoryGroup] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)  # of the kept groups: weight versions since they were begun
    dropped: Counter[str] = field(default_factory=Counter)  # rollouts by filter
    draws: int = 0  # most prompts that were drawn in one place
    reused: list[TrajectoryGroup] = field(default_factory=list)  # of the kept groups

    def add(self, group: TrajectoryGroup, draw: int = 1, age: int = 0) -> TrajectoryGroup | None:
        """One group, scored and shaped. Returns what is kept of it. draw: which one in its place"""
        enough = [group] if len(group.trajectories) >= self.min_group_size else []
        kept, dropped = passed(enough, self.algorithm.filters, self.min_group_size)
        self.drawn.append(apply_overlong_penalty(group, self.algorithm.overlong))
        self.dropped.update(dropped)
        self.draws = max(self.draws, draw)
        if not kept:
            return None
        self.kept.append(apply_overlong_penalty(kept[0], self.algorithm.overlong))
        self.staleness.append(age)
        return self.kept[-1]

    def add_reused(self, group: TrajectoryGroup, age: int) -> None:
        """A group that an earlier step has kept and trained on; such groups come first."""
        self.kept.append(group)
        self.staleness.append(age)
        self.reused.append(group)

    @property
    def fresh(self) -> list[TrajectoryGroup]:
        """The kept groups of this step's own prompts."""
        return self.kept[len(self.reused) :]

    def check(self) -> None:
        """Raises NoSignalError where nothing can be learned from, or nothing new has come beside what is used again."""
        if self.kept and any(group.trajectories for group in self.drawn):
            return
        said = f"none of {len(self.drawn)} groups has {self.min_group_size} scored replies left to learn from"
        if self.dropped.total():
            told = ", ".join(f"{name} dropped {count}" for name, count in self.dropped.items())
            said += (
                f" after {self.draws} draws ({told} replies). The tasks are too hard or too easy for the policy; "
                "take others, or change algorithm.filters or algorithm.max_resample_rounds"
            )
        raise NoSignalError(said)

    def metrics(self) -> dict[str, float]:
        """Shares of the rollouts, and how often prompts were drawn; nothing where nothing is filtered or penalised."""
        drawn = max(1, self._num_rollouts(self.drawn))
        kept = self._num_rollouts(self.fresh)
        metrics = {}
        if self.algorithm.filters:
            names = [name_of(each) for each in self.algorithm.filters]
            shares = {f"filter/{name}": self.dropped[name] / drawn for name in names}
            metrics = {"filter/kept": kept / drawn, **shares, "filter/resample_rounds": float(self.draws)}
        if self.algorithm.overlong is not None:
            lengths = [num_written(each) for group in self.drawn for each in group.trajectories]
            metrics["reward/overlong_penalty"] = sum(map(self.algorithm.overlong.penalty, lengths)) / drawn
        return metrics

    def staleness_metrics(self) -> dict[str, float]:
        """How old the weights were that the kept groups were begun with, in versions."""
        return {
            "staleness/mean": sum(self.staleness) / len(self.staleness),
            "staleness/max": float(max(self.staleness)),
            "staleness/depth": float(self.depth),
            "staleness/reused": len(self.reused) / len(self.kept),
        }

    @staticmethod
    def _num_rollouts(groups: Sequence[TrajectoryGroup]) -> int:
        return sum(len(group.trajectories) for group in groups)


def apply_overlong_penalty(group: TrajectoryGroup, overlong: Overlong | None) -> TrajectoryGroup:
    """The group with rewards less what its long responses cost."""
    if overlong is None:
        return group
    pairs = zip(group.rewards, group.trajectories, strict=True)
    return replace(group, rewards=tuple(reward + overlong.penalty(num_written(response)) for reward, response in pairs))
