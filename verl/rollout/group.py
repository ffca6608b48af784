"""Rolling out one prompt: G episodes at once, each scored as soon as it is there."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from verl.data.chat import ChatCodec
from verl.rollout.engine import RolloutEngine, Sampling
from verl.rollout.scoring import Fault, Scorer
from verl.types import Completion, FinishReason, Message, Outcome, Score, Task, Trajectory, TrajectoryGroup, Turn

_OUTCOMES = {
    FinishReason.STOP: Outcome.SCORED,
    FinishReason.LENGTH: Outcome.MODEL_FAULT,
    FinishReason.ABORT: Outcome.INFRASTRUCTURE_FAULT,
}


@dataclass(frozen=True)
class GroupRollout:
    """Everything that a group of rollouts needs but the task."""

    engine: RolloutEngine
    codec: ChatCodec
    scorer: Scorer
    sampling: Sampling

    async def run(self, task: Task, num_rollouts: int, step: int, first_seed: int | None = None) -> TrajectoryGroup:
        """`num_rollouts` single-turn episodes of the task, scored. Seeds count up from `first_seed`."""
        prompt_ids = self.codec.task_prompt_ids(task)
        sampling = replace(self.sampling, n=num_rollouts, seed=first_seed)
        completions = await self.engine.generate(prompt_ids, sampling)
        episodes = [self._episode(task, index, prompt_ids, each) for index, each in enumerate(completions)]
        judged = await asyncio.gather(*(self._score(episode, step) for episode in episodes))
        scored = [(episode, each) for episode, each in zip(episodes, judged, strict=True) if isinstance(each, Score)]
        return TrajectoryGroup(
            task,
            trajectories=tuple(episode for episode, _ in scored),
            scores=tuple(score for _, score in scored),
            rewards=tuple(score.total for _, score in scored),
            faults=tuple(str(each) for each in judged if not isinstance(each, Score)),
        )

    async def _score(self, episode: Trajectory, step: int) -> Score | Fault:
        if episode.outcome is Outcome.INFRASTRUCTURE_FAULT:
            return Fault(episode.task.id, episode.index, "the engine broke the reply off")
        return await self.scorer.score(episode, episode.task, step)

    def _episode(self, task: Task, index: int, prompt_ids: tuple[int, ...], completion: Completion) -> Trajectory:
        message = Message("assistant", self.codec.reply_text(completion.token_ids))
        return Trajectory(
            task=task,
            index=index,
            turns=(Turn(prompt_ids, completion, message),),
            stop_reason=completion.finish_reason,
            outcome=_OUTCOMES[completion.finish_reason],
        )
