"""Rolls out one prompt: G concurrent episodes, each scored as soon as it is finished."""

import asyncio
from array import array
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace

from verl.chat.template import ChatTemplate
from verl.episodes.episode import EpisodeRunner
from verl.errors import LostRequestError
from verl.rollout.engine import RolloutEngine, Sampling
from verl.scoring.pool import Fault, Scorer
from verl.types import (
    Completion,
    FinishReason,
    Message,
    Outcome,
    Score,
    StopReason,
    Task,
    Trajectory,
    TrajectoryGroup,
    Turn,
)

_Judged = tuple[Trajectory, Score] | Fault


@dataclass(frozen=True)
class GroupRollout:
    """Everything that a group of rollouts needs except the task.

    episode_runner: for multi-turn episodes; None: an episode is the task's prompt and one response
    """

    engine: RolloutEngine
    chat: ChatTemplate
    scorer: Scorer
    sampling: Sampling
    episode_runner: EpisodeRunner | None = None

    async def run(self, task: Task, num_rollouts: int, step: int, first_seed: int | None = None) -> TrajectoryGroup:
        """Runs and scores `num_rollouts` episodes of the task, with consecutive seeds from `first_seed`."""
        started = self._start(task, num_rollouts, first_seed)
        judged = await asyncio.gather(
            *(self._judge(task, index, episode, step) for index, episode in enumerate(started))
        )
        scored = [each for each in judged if not isinstance(each, Fault)]
        return TrajectoryGroup(
            task,
            trajectories=tuple(episode for episode, _ in scored),
            scores=tuple(score for _, score in scored),
            rewards=tuple(score.total for _, score in scored),
            faults=tuple(str(each) for each in judged if isinstance(each, Fault)),
            lost_uses=tuple(use for each in judged for use in (each if isinstance(each, Fault) else each[0]).lost_uses),
        )

    async def close(self) -> None:
        """Close the episodes' shared resources; the engine and the scorer belong to the caller."""
        if self.episode_runner is not None:
            await self.episode_runner.close()

    def _start(self, task: Task, num_rollouts: int, first_seed: int | None) -> list[Awaitable[Trajectory | Fault]]:
        """Start the episodes concurrently; single-turn responses to one prompt are one request."""
        if self.episode_runner is None:
            prompt_ids = self.chat.task_prompt_ids(task)
            sampling = replace(self.sampling, n=num_rollouts, seed=first_seed)
            responses = asyncio.ensure_future(self.engine.generate(prompt_ids, sampling))
            context_ids = array("i", prompt_ids)  # one for all, see `Completion`
            return [self._response(task, index, context_ids, responses) for index in range(num_rollouts)]
        seeds = [None if first_seed is None else first_seed + index for index in range(num_rollouts)]
        return [
            self.episode_runner.run(self.engine, self.sampling, task, index, seed) for index, seed in enumerate(seeds)
        ]

    async def _judge(self, task: Task, index: int, started: Awaitable[Trajectory | Fault], step: int) -> _Judged:
        try:
            episode = await started
        except LostRequestError as error:
            return Fault(task.id, index, str(error))
        if isinstance(episode, Fault):
            return episode
        score = await self.scorer.score(episode, episode.task, step)
        return replace(score, lost_uses=episode.lost_uses) if isinstance(score, Fault) else (episode, score)

    async def _response(
        self, task: Task, index: int, prompt_ids: Sequence[int], responses: Awaitable[tuple[Completion, ...]]
    ) -> Trajectory | Fault:
        completion = (await responses)[index]
        if completion.finish_reason is FinishReason.ABORT:
            return Fault(task.id, index, "the engine aborted the response")
        message = Message("assistant", self.chat.response_text(completion.token_ids))
        turns = (Turn(prompt_ids, completion, message),)
        outcome = Outcome.SCORED if completion.finish_reason is FinishReason.STOP else Outcome.MODEL_FAULT
        return Trajectory(task, index, turns, StopReason(completion.finish_reason), outcome)
