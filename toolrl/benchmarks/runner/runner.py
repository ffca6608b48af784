"""Runs the tasks of a category concurrently, each once, and records each as soon as it is done."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Protocol

from toolrl.benchmarks.runner.benchmark import Category
from toolrl.benchmarks.runner.records import digest_of
from verl.data.lengths import PromptIds, prompt_excess
from verl.episodes.group import GroupRollout
from verl.errors import DataError
from verl.scoring.rewards import Rewards
from verl.types import Score, Task, TrajectoryGroup

EXACT = "exact"  # the metric that is 1 for the maximum reward
_TOLERANCE = 1e-9
_STEP = 0  # step of scheduled rewards
_MAX_CONCURRENT = 256  # episodes; enough for any engine, whose own limit is rollout.max_num_seqs
_MAX_ROLLOUTS = 256  # per task, so that seeds of tasks do not overlap


class _TooManyError(Exception):
    """Too many tasks could not be answered."""


class ResultSink(Protocol):
    """Destination of the results: `toolrl.benchmarks.runner.records.Records`, or an in-memory one."""

    def add(self, group: TrajectoryGroup, values: Sequence[float]) -> None:
        """Add the rollouts of a task with the metric of each."""

    def add_unasked(self, task: Task, problem: str) -> None:
        """Add a task whose prompt is too long or invalid."""


@dataclass(frozen=True)
class Runner:
    """max_faults: infrastructure failures after which the remaining tasks are skipped"""

    rollout: GroupRollout
    prompt_ids: PromptIds
    rewards: Rewards
    max_prompt_length: int
    n: int = 1
    seed: int = 0
    max_faults: float = inf

    async def run(
        self, category: Category, tasks: Sequence[Task], records: ResultSink, done: Callable[[], None]
    ) -> list[str]:
        """Run and record the tasks, `done` after each. Returns a reason per failed task; these are not recorded."""
        assert self.n <= _MAX_ROLLOUTS
        slots = asyncio.Semaphore(_MAX_CONCURRENT)
        faults: list[str] = []

        async def answer(task: Task) -> None:
            async with slots:
                faults.extend((await self._answer(category, task, records))[:1])
            done()
            if len(faults) > self.max_faults:
                raise _TooManyError

        running = [asyncio.create_task(answer(task)) for task in tasks]
        try:
            with suppress(_TooManyError):
                await asyncio.gather(*running)
        finally:
            for each in running:
                each.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return faults

    async def _answer(self, category: Category, task: Task, records: ResultSink) -> tuple[str, ...]:
        try:
            length = len(self.prompt_ids(task))
        except DataError as error:  # rejected by the chat template
            records.add_unasked(task, str(error))
            return ()
        if problem := prompt_excess(length, self.max_prompt_length):
            records.add_unasked(task, problem)
            return ()
        seed = (self.seed << 40) | (int(digest_of(category, task)[:8], 16) << 8)
        group = await self.rollout.run(task, self.n, _STEP, seed)
        if not group.faults:
            records.add(group, [self._metric_value(category.metric, task, score) for score in group.scores])
        return group.faults

    def _metric_value(self, metric: str, task: Task, score: Score) -> float:
        if metric == "total":
            return score.total
        if metric == EXACT:
            maximum = self.rewards.maximum(task, _STEP)
            assert maximum is not None
            return float(score.total >= maximum - _TOLERANCE)
        return score.parts.get(metric, 0.0)  # a truncated episode has no parts
