"""veRL's reward functions: (data_source, solution_str, ground_truth, extra_info), and its batch manager's, of lists.

`solution_str` is the decoded response, observations included.
"""

from __future__ import annotations

import json
from typing import Any

from verl.formats.openai import as_openai
from verl.types import Task, Trajectory
from verl.utils.reward_score.functions import Form, Log, rounds

_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")


def _arguments(trajectory: Trajectory, task: Task, step: int, log: Log) -> dict[str, Any]:
    """What veRL 0.9.1's reward managers pass, with what its agent loop adds to `extra_info`."""
    own = trajectory.score
    rewards = [turn.reward for turn in trajectory.turns if turn.reward is not None]
    extra = {
        **task.extra,
        "num_turns": 1 + sum(1 + bool(observed) for _, observed in rounds(trajectory)),
        "rollout_reward_scores": {} if own is None else {**own.parts, "score": own.total},
        "turn_scores": rewards,
        "tool_rewards": [],  # tools have no rewards of their own
        "raw_prompt": [as_openai(message) for message in trajectory.prompt],
    }
    return {
        "data_source": task.data_source,
        "solution_str": trajectory.decoded,
        "ground_truth": json.loads(task.answer) if task.json_answer else task.answer,
        "extra_info": extra,
    }


def _lists(trajectory: Trajectory, task: Task, step: int, log: Log) -> dict[str, Any]:
    return {f"{name}s": [value] for name, value in _arguments(trajectory, task, step, log).items()}


VERL = Form(parameter="solution_str", arguments=_arguments, names=_NAMES)
VERL_BATCH = Form(
    parameter="solution_strs", arguments=_lists, names=tuple(f"{name}s" for name in _NAMES), of_lists=True
)
