"""Rolling out one prompt: G episodes at once, each scored."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from verl.data.chat import ChatCodec
from verl.rollout.engine import RolloutEngine, Sampling
from verl.types import FinishReason, Message, Outcome, Task, Trajectory, TrajectoryGroup, Turn
from verl.utils.reward_score.base import Reward


@dataclass(frozen=True)
class GroupRollout:
    """Everything that a group of rollouts needs but the task."""

    engine: RolloutEngine
    codec: ChatCodec
    reward: Reward
    sampling: Sampling

    async def run(self, task: Task, num_rollouts: int, step: int, first_seed: int | None = None) -> TrajectoryGroup:
        """`num_rollouts` single-turn episodes of the task, scored. Seeds count up from `first_seed`."""
        prompt_ids = self.codec.prompt_ids(task.prompt)
        seeds = [None if first_seed is None else first_seed + index for index in range(num_rollouts)]
        trajectories = await asyncio.gather(
            *(self._episode(task, index, prompt_ids, seed) for index, seed in enumerate(seeds))
        )
        scores = tuple(self.reward.score(trajectory, task, step) for trajectory in trajectories)
        return TrajectoryGroup(task, tuple(trajectories), scores, tuple(score.total for score in scores))

    async def _episode(self, task: Task, index: int, prompt_ids: tuple[int, ...], seed: int | None) -> Trajectory:
        completion = await self.engine.generate(prompt_ids, replace(self.sampling, seed=seed))
        message = Message("assistant", self.codec.reply_text(completion.token_ids))
        truncated = completion.finish_reason is FinishReason.LENGTH
        return Trajectory(
            task=task,
            index=index,
            turns=(Turn(prompt_ids, completion, message),),
            stop_reason=completion.finish_reason,
            num_tool_calls=0,
            outcome=Outcome.MODEL_FAULT if truncated else Outcome.SCORED,
        )
