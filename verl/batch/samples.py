"""Converts scored trajectories to flat samples. The tokens sampled by the engine are the trained tokens, unchanged."""

from __future__ import annotations

from collections.abc import Sequence

from verl.types import Completion, Message, Sample, TrajectoryGroup, Turn

_UNKNOWN = float("nan")  # the engine's log-prob of a token it did not sample


def to_samples(group: TrajectoryGroup, group_id: int, train_on_observations: bool = False) -> list[Sample]:
    """One sample per trajectory with at least one turn."""
    scored = zip(group.trajectories, group.rewards, strict=True)
    return [
        sample_from_turns(trajectory.turns, group_id, reward, train_on_observations)
        for trajectory, reward in scored
        if trajectory.turns
    ]


def sample_from_turns(
    turns: Sequence[Turn], group_id: int = 0, reward: float = 0.0, train_on_observations: bool = False
) -> Sample:
    """The tokens of all turns in order; completions are trained. `reward` is the episode's.

    With `train_on_observations` observation tokens are trained, too; the prompt never is.
    """
    token_ids: list[int] = []
    action_mask: list[bool] = []
    logprobs: list[float] = []
    turn_rewards: list[tuple[int, float]] = []
    for number, turn in enumerate(turns):
        context, written = turn.context_ids, turn.completion.token_ids
        observed = train_on_observations and number > 0
        token_ids += [*context, *written]
        action_mask += [observed] * len(context) + [True] * len(written)
        logprobs += [*[_UNKNOWN if observed else 0.0] * len(context), *turn.completion.logprobs]
        if turn.reward is not None:
            turn_rewards.append((len(token_ids) - 1, turn.reward))
    return Sample(tuple(token_ids), tuple(action_mask), tuple(logprobs), group_id, reward, tuple(turn_rewards))


def sample_from_completion(
    prompt_ids: tuple[int, ...], completion: Completion, group_id: int = 0, reward: float = 0.0
) -> Sample:
    """The sample of a prompt and its completion."""
    return sample_from_turns([Turn(prompt_ids, completion, Message("assistant", ""))], group_id, reward)
