"""Putting the tasks of a category before a model: side by side, each once, recorded as soon as it is done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Protocol

from verl.data.lengths import PromptIds
from verl.errors import DataError
from verl.evaluation.base import Category
from verl.evaluation.records import digest_of
from verl.rollout.group import GroupRollout
from verl.types import Score, Task, TrajectoryGroup
from verl.utils.reward_score.rewards import Rewards

EXACT = "exact"  # the metric that is 1 for the highest reward there is
_TOLERANCE = 1e-9
_STEP = 0  # of rewards that follow a schedule
_MOST_ROLLOUTS = 256  # of a task; their seeds must not meet another task's


class _TooManyError(Exception):
    """Too many tasks could not be answered."""


class ResultSink(Protocol):
    """Where answers go: `verl.evaluation.records.Records`, or what only counts them."""

    def add(self, group: TrajectoryGroup, figures: Sequence[float]) -> None:
        """The rollouts of a task with the figure of each."""

    def add_unasked(self, task: Task, problem: str) -> None:
        """A task whose prompt the model has no room for."""


@dataclass(frozen=True)
class Runner:
    """How one category is played.

    most_faults: tasks that may fail for no fault of the model; with one more the rest is not asked any more
    """

    rollout: GroupRollout
    prompt_ids: PromptIds
    rewards: Rewards
    max_prompt_length: int
    n: int = 1
    seed: int = 0
    max_concurrent: int = 256
    most_faults: float = inf

    async def run(
        self, category: Category, tasks: Sequence[Task], records: ResultSink, done: Callable[[], None]
    ) -> list[str]:
        """Answers the tasks into the records; `done` is called after each. Returns why some could not be answered, one
        reason a task.

        Those are nobody's wrong answers: they stay unrecorded, and are asked again when the evaluation goes on.
        """
        assert self.n <= _MOST_ROLLOUTS
        places = asyncio.Semaphore(self.max_concurrent)
        faults: list[str] = []

        async def answer(task: Task) -> None:
            async with places:
                faults.extend((await self._answer(category, task, records))[:1])
            done()
            if len(faults) > self.most_faults:
                raise _TooManyError

        playing = [asyncio.create_task(answer(task)) for task in tasks]
        try:
            with suppress(_TooManyError):
                await asyncio.gather(*playing)
        finally:
            for each in playing:
                each.cancel()
            await asyncio.gather(*playing, return_exceptions=True)
        return faults

    async def _answer(self, category: Category, task: Task, records: ResultSink) -> tuple[str, ...]:
        try:
            length = len(self.prompt_ids(task))
        except DataError as error:  # the chat template refuses the messages
            records.add_unasked(task, str(error))
            return ()
        if length > self.max_prompt_length:
            records.add_unasked(task, f"{length} tokens, where max_prompt_length={self.max_prompt_length}")
            return ()
        seed = (self.seed << 40) | (int(digest_of(category, task)[:8], 16) << 8)
        group = await self.rollout.run(task, self.n, _STEP, seed)
        if not group.faults:
            records.add(group, [self._figure(category.metric, task, score) for score in group.scores])
        return group.faults

    def _figure(self, metric: str, task: Task, score: Score) -> float:
        if metric == "total":
            return score.total
        if metric == EXACT:
            most = self.rewards.maximum(task, _STEP)
            assert most is not None
            return float(score.total >= most - _TOLERANCE)
        return score.parts.get(metric, 0.0)  # an episode that was cut off has no parts
