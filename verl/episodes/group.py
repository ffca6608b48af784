"""Rolls out one prompt: G concurrent episodes, each scored as soon as it is finished."""

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Self

from verl.episodes.episode import EpisodeRunner
from verl.errors import LostRequestError, VerlError
from verl.rollout.engine import RolloutEngine, Sampling
from verl.rollout.joined import JoinedRequests
from verl.scoring.pool import Fault, Scorer
from verl.tracking.progress import Progress
from verl.types import Score, Task, Trajectory, TrajectoryGroup

_FOLLOW_S = 3.0  # between two looks at the engines' tokens


@dataclass(frozen=True)
class GroupRollout:
    """Everything that a group of rollouts needs except the task."""

    engine: RolloutEngine
    scorer: Scorer
    sampling: Sampling
    episode_runner: EpisodeRunner
    progress: Progress = field(default_factory=Progress, kw_only=True)  # of all steps together

    async def run(self, task: Task, num_rollouts: int, step: int, first_seed: int | None = None) -> TrajectoryGroup:
        """Runs and scores `num_rollouts` episodes of the task, with consecutive seeds from `first_seed`.

        step: as for `Reward.score`
        """
        self.progress.ask(num_rollouts)
        runner = self.episode_runner.for_group()
        # A joined request ends with its longest response, so episodes with a next turn do not wait for one another.
        engine = JoinedRequests(self.engine) if runner.limits.max_turns == 1 else self.engine
        seeds = [None if first_seed is None else first_seed + index for index in range(num_rollouts)]
        started = [runner.run(engine, self.sampling, task, index, seed) for index, seed in enumerate(seeds)]
        judged = await asyncio.gather(*(self._judge(task, *numbered, step) for numbered in enumerate(started)))
        lost = tuple(use for each in judged for use in (each if isinstance(each, Fault) else each[0]).lost_uses)
        return _scored(TrajectoryGroup(task, (), (), (), lost_uses=lost), judged)

    def within(self, max_turns: int) -> Self:
        """With at most so many turns per episode."""
        limits = self.episode_runner.limits
        fewer = replace(limits, max_turns=min(limits.max_turns, max_turns))
        return replace(self, episode_runner=replace(self.episode_runner, limits=fewer))

    async def rescored(self, group: TrajectoryGroup, step: int) -> TrajectoryGroup:
        """The same episodes with their scores at another step, before any shaping."""
        scores = await asyncio.gather(*(self.scorer.score(each, each.task, step) for each in group.trajectories))
        judged = [
            score if isinstance(score, Fault) else (episode, score)
            for episode, score in zip(group.trajectories, scores, strict=True)
        ]
        return _scored(group, judged)

    async def run_all(
        self, tasks: Sequence[Task], n: int, seed: int | None = None, step: int = 0
    ) -> list[TrajectoryGroup]:
        """`n` rollouts of every task. seed: None: without seeds"""
        firsts = [None if seed is None else (seed << 40) + number * n for number in range(len(tasks))]
        runs = [self.run(task, n, step, first) for task, first in zip(tasks, firsts, strict=True)]
        return await asyncio.gather(*runs)

    async def follow(self) -> None:
        """Until canceled, count the tokens that the engine has written: a response may take minutes."""
        while True:
            await asyncio.sleep(_FOLLOW_S)
            if self.progress.asked > self.progress.done:
                with suppress(VerlError):  # raised where a response is waited for
                    self.progress.write(await self.engine.tokens_written())

    async def close(self) -> None:
        """Close the episodes' shared resources; the engine and the scorer belong to the caller."""
        await self.episode_runner.close()

    async def _judge(
        self, task: Task, index: int, started: Awaitable[Trajectory | Fault], step: int
    ) -> tuple[Trajectory, Score] | Fault:
        tokens = 0
        try:
            episode = await started
            if isinstance(episode, Fault):
                return episode
            tokens = sum(len(turn.completion.token_ids) for turn in episode.turns)
            score = await self.scorer.score(episode, episode.task, step)
        except LostRequestError as error:
            return Fault(task.id, index, str(error))
        finally:
            self.progress.finish(tokens)
        return replace(score, lost_uses=episode.lost_uses) if isinstance(score, Fault) else (episode, score)


def _scored(group: TrajectoryGroup, judged: Sequence[tuple[Trajectory, Score] | Fault]) -> TrajectoryGroup:
    """The group with these scored episodes in place of its own, but for those that are not counted, and with their
    faults besides its own."""
    scored = [each for each in judged if not isinstance(each, Fault) and each[1].counted]
    return replace(
        group,
        trajectories=tuple(episode for episode, _ in scored),
        scores=tuple(score for _, score in scored),
        rewards=tuple(score.total for _, score in scored),
        faults=(*group.faults, *(str(each) for each in judged if isinstance(each, Fault))),
    )
