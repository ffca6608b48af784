"""Validation: responses to every task of the validation sets, scored as at the step that it follows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import sqrt
from statistics import fmean, stdev
from typing import Any

from verl.episodes.group import GroupRollout
from verl.scoring.rewards import Rewards
from verl.tracking.names import STDERR
from verl.tracking.transcripts import group_rows
from verl.trainer.metrics import score_means
from verl.types import Task, TrajectoryGroup
from verl.verl_compat.metrics import verl_validation_metrics

_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Validator:
    """Evaluates the validation sets, by name."""

    sets: Mapping[str, Sequence[Task]]
    rollout: GroupRollout
    rewards: Rewards  # for the maximum score, if known
    n: int = 1  # responses per task, whose scores are averaged
    seed: int | None = 0  # seed of sampled responses; None: not seeded
    verl_names: bool = False  # log veRL's metrics, too

    @property
    def greedy(self) -> GroupRollout:
        return replace(self.rollout, sampling=replace(self.rollout.sampling.whole(), temperature=0.0))

    async def rollouts(self, step: int) -> dict[str, Sequence[TrajectoryGroup]]:
        """The scored responses by set, with the same seeds at every validation. step: completed updates"""
        seed = self.seed if self.rollout.sampling.temperature > 0 else None  # greedy responses can share batches
        return {name: await self.rollout.run_all(tasks, self.n, seed, step) for name, tasks in self.sets.items()}

    def metrics(self, rollouts: Mapping[str, Sequence[TrajectoryGroup]], step: int) -> dict[str, float]:
        """val/<set>/total and /exact with their _stderr, the same by data source if there are several, and /<part>.

        exact: the fraction of responses with the maximum score of this step, among those whose reward defines one
        """
        means = {name: self._means(groups, step) for name, groups in rollouts.items()}
        metrics = {f"val/{name}/{key}": value for name, its in means.items() for key, value in its.items()}
        return metrics | (verl_validation_metrics(chain(*rollouts.values()), self.n) if self.verl_names else {})

    def rows(self, rollouts: Mapping[str, Sequence[TrajectoryGroup]], step: int) -> Iterator[dict[str, Any]]:
        """The transcript of every response, with its set and, where the reward defines it, `exact`."""
        for name, groups in rollouts.items():
            for group in groups:
                exact = [{"exact": reached} for reached in self._reached(group, step)]
                for row, found in zip(group_rows(step, group), exact or [{}] * len(group.scores), strict=True):
                    yield {"set": name, **row, **found}

    def _means(self, groups: Sequence[TrajectoryGroup], step: int) -> dict[str, float]:
        means = score_means([score for group in groups for score in group.scores]) | self._estimates(groups, step)
        sources = [group.task.data_source for group in groups]
        for source in sorted(set(sources)) if len(set(sources)) > 1 else ():
            own = [group for group in groups if group.task.data_source == source]
            means |= {f"{source}/{name}": value for name, value in self._estimates(own, step).items()}
        if faults := sum(len(group.faults) for group in groups):
            means["faults"] = faults
        return means

    def _estimates(self, groups: Sequence[TrajectoryGroup], step: int) -> dict[str, float]:
        """total and exact with their standard errors."""
        totals = [[score.total for score in group.scores] for group in groups]
        return _estimate("total", totals) | _estimate("exact", [self._reached(group, step) for group in groups])

    def _reached(self, group: TrajectoryGroup, step: int) -> list[float]:
        """1 for each response with the maximum score, else 0; empty: the reward defines none."""
        most = self.rewards.maximum(group.task, step)
        return [] if most is None else [float(score.total >= most - _TOLERANCE) for score in group.scores]


def _estimate(name: str, by_task: Sequence[Sequence[float]]) -> dict[str, float]:
    """The mean over all responses, and its standard error over the tasks if there are two or more."""
    values = [value for task in by_task for value in task]
    tasks = [fmean(task) for task in by_task if task]
    error = {name + STDERR: stdev(tasks) / sqrt(len(tasks))} if len(tasks) > 1 else {}
    return {name: sum(values) / len(values), **error} if values else {}
