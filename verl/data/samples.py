"""From scored trajectories to flat samples: what the engine emitted is what is trained, token for token."""

from __future__ import annotations

from verl.types import Completion, Outcome, Sample, Trajectory, TrajectoryGroup


def to_samples(group: TrajectoryGroup, group_id: int) -> list[Sample]:
    """One sample per trajectory; those that an infrastructure fault ended are left out, never trained as a zero."""
    scored = zip(group.trajectories, group.rewards, strict=True)
    return [
        _of_trajectory(trajectory, reward, group_id)
        for trajectory, reward in scored
        if trajectory.outcome is not Outcome.INFRASTRUCTURE_FAULT and trajectory.turns
    ]


def _of_trajectory(trajectory: Trajectory, reward: float, group_id: int) -> Sample:
    (turn,) = trajectory.turns  # dialogues with several turns come with the episode driver
    return to_sample(turn.context_ids, turn.completion, group_id, reward)


def to_sample(prompt_ids: tuple[int, ...], completion: Completion, group_id: int = 0, reward: float = 0.0) -> Sample:
    """A prompt and what the engine wrote after it; the completion's tokens are the trained ones."""
    length, written = len(prompt_ids), len(completion.token_ids)
    return Sample(
        token_ids=prompt_ids + completion.token_ids,
        action_mask=(False,) * length + (True,) * written,
        rollout_logprobs=(0.0,) * length + completion.logprobs,
        group=group_id,
        reward=reward,
    )
