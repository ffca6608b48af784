"""From scored trajectories to flat samples: what the engine emitted is what is trained, token for token."""

from __future__ import annotations

from verl.types import Outcome, Sample, Trajectory, TrajectoryGroup


def to_samples(group: TrajectoryGroup, group_id: int) -> list[Sample]:
    """One sample per trajectory; those that an infrastructure fault ended are left out, never trained as a zero."""
    scored = zip(group.trajectories, group.rewards, strict=True)
    return [
        _to_sample(trajectory, reward, group_id)
        for trajectory, reward in scored
        if trajectory.outcome is not Outcome.INFRASTRUCTURE_FAULT and trajectory.turns
    ]


def _to_sample(trajectory: Trajectory, reward: float, group_id: int) -> Sample:
    (turn,) = trajectory.turns  # dialogues with several turns come with the episode driver
    prompt, completion = turn.prompt_ids, turn.completion
    return Sample(
        token_ids=prompt + completion.token_ids,
        action_mask=(False,) * len(prompt) + (True,) * len(completion.token_ids),
        rollout_logprobs=(0.0,) * len(prompt) + completion.logprobs,
        group=group_id,
        reward=reward,
    )
