"""Rolls out one prompt: G concurrent episodes, each scored as soon as it is finished."""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace

from verl.episodes.episode import EpisodeRunner
from verl.errors import LostRequestError
from verl.rollout.engine import RolloutEngine, Sampling
from verl.rollout.joined import JoinedRequests
from verl.scoring.pool import Fault, Scorer
from verl.types import Score, Task, Trajectory, TrajectoryGroup


@dataclass(frozen=True)
class GroupRollout:
    """Everything that a group of rollouts needs except the task."""

    engine: RolloutEngine
    scorer: Scorer
    sampling: Sampling
    episode_runner: EpisodeRunner

    async def run(self, task: Task, num_rollouts: int, step: int, first_seed: int | None = None) -> TrajectoryGroup:
        """Runs and scores `num_rollouts` episodes of the task, with consecutive seeds from `first_seed`."""
        runner = self.episode_runner.for_group()
        # A joined request ends with its longest response, so episodes with a next turn do not wait for one another.
        engine = JoinedRequests(self.engine) if runner.limits.max_turns == 1 else self.engine
        seeds = [None if first_seed is None else first_seed + index for index in range(num_rollouts)]
        started = [runner.run(engine, self.sampling, task, index, seed) for index, seed in enumerate(seeds)]
        judged = await asyncio.gather(*(self._judge(task, *numbered, step) for numbered in enumerate(started)))
        scored = [each for each in judged if not isinstance(each, Fault)]
        return TrajectoryGroup(
            task,
            trajectories=tuple(episode for episode, _ in scored),
            scores=tuple(score for _, score in scored),
            rewards=tuple(score.total for _, score in scored),
            faults=tuple(str(each) for each in judged if isinstance(each, Fault)),
            lost_uses=tuple(use for each in judged for use in (each if isinstance(each, Fault) else each[0]).lost_uses),
        )

    async def run_all(self, tasks: Sequence[Task], n: int, seed: int | None = None) -> list[TrajectoryGroup]:
        """`n` rollouts of every task, with rewards as at step 0. None: without seeds"""
        firsts = [None if seed is None else (seed << 40) + number * n for number in range(len(tasks))]
        return await asyncio.gather(*(self.run(task, n, 0, first) for task, first in zip(tasks, firsts, strict=True)))

    async def close(self) -> None:
        """Close the episodes' shared resources; the engine and the scorer belong to the caller."""
        await self.episode_runner.close()

    async def _judge(
        self, task: Task, index: int, started: Awaitable[Trajectory | Fault], step: int
    ) -> tuple[Trajectory, Score] | Fault:
        try:
            episode = await started
        except LostRequestError as error:
            return Fault(task.id, index, str(error))
        if isinstance(episode, Fault):
            return episode
        score = await self.scorer.score(episode, episode.task, step)
        return replace(score, lost_uses=episode.lost_uses) if isinstance(score, Fault) else (episode, score)
