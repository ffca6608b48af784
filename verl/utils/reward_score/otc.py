"""OTC-PO's rewards (arXiv 2504.14870): a right answer is worth more the fewer tool calls it took.

m: calls of a trajectory; n: the fewest calls of any right trajectory to the question so far; c: smoothing, the most
calls that the task allows; a: scale; r_phi: correctness in {0, 1} (with -1 for wrong answers the product would reward
them for many calls).

    R = a * r_tool * r_phi
    OTC-PPO    r_tool = cos(m pi / (2 m + c))
    OTC-GRPO   r_tool = sin(f pi / (2 n)) with f = 2 n m / (n + m); for n = 0 the cosine above
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import cos, pi, sin
from typing import Any

from verl.errors import ConfigError
from verl.types import Score, Task, Trajectory, TrajectoryGroup
from verl.utils.reward_score.base import Mutation, as_mutations, written
from verl.utils.reward_score.math import boxed, math_correct, spoiled_boxes
from verl.utils.reward_score.search_r1 import answer_reply, episode_text, exact_match, spoiled_answers


def frugality(calls: int, smoothing: float) -> float:
    """OTC-PPO's r_tool: 1 without calls, falling towards 0; faster with a smaller `smoothing` (c > 0)."""
    return cos(calls * pi / (2 * calls + smoothing))


def fit(calls: int, fewest: int, smoothing: float) -> float:
    """OTC-GRPO's r_tool: 1 at exactly `fewest` calls, less on both sides; sin(pi m / (m + n)) where n > 0."""
    return sin(pi * calls / (calls + fewest)) if fewest else frugality(calls, smoothing)


def question_key(task: Task) -> str:
    """What a question is remembered by: its own words, because two files may give different ones the same number."""
    said = json.dumps([[message.role, message.content] for message in task.prompt])
    return hashlib.sha256(said.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class _OtcReward:
    """Options: how answers are judged (math: a box; search: an answer block), c (`max_calls`) and a (`scale`)."""

    answers: str = "search"  # search | math
    max_calls: float = 4.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.answers not in ("search", "math"):
            raise ConfigError(f"reward option answers must be search or math, got {self.answers!r}")
        for name in ("max_calls", "scale"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"reward option {name} must be positive, got {getattr(self, name)!r}")

    def correct(self, trajectory: Trajectory, task: Task) -> bool:
        """r_phi."""
        if self.answers == "math":
            return math_correct(written(trajectory), task.answer)
        return exact_match(episode_text(trajectory), task.answer)

    def maximum(self, task: Task, step: int) -> float:
        return self.scale

    def gold(self, task: Task, step: int) -> str:
        return boxed(task.answer) if self.answers == "math" else answer_reply(task.answer)

    def mutations(self, task: Task, step: int) -> list[Mutation]:
        return as_mutations((spoiled_boxes if self.answers == "math" else spoiled_answers)(task.answer))


@dataclass(frozen=True)
class OtcPpoReward(_OtcReward):
    """OTC-PPO: each trajectory by itself."""

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        correct = float(self.correct(trajectory, task))
        tool = frugality(trajectory.num_tool_calls, self.max_calls)
        return Score(self.scale * tool * correct, {"correct": correct, "frugality": tool})


@dataclass(frozen=True)
class OtcGrpoReward(_OtcReward):
    """OTC-GRPO: by the fewest calls of any right trajectory so far, this group's own included.

    The state maps questions to n, which only falls. Until a question was answered once there is no n, and every reward
    is zero. Unshaped, as in validation, a score is that of the answer alone.
    """

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        correct = float(self.correct(trajectory, task))
        return Score(self.scale * correct, {"correct": correct})

    def shape(self, group: TrajectoryGroup, state: Mapping[str, Any]) -> tuple[tuple[float, ...], Mapping[str, Any]]:
        key = question_key(group.task)
        scored = list(zip(group.trajectories, group.scores, strict=True))
        seen = [trajectory.num_tool_calls for trajectory, score in scored if score.parts["correct"]]
        fewest = min([*seen, *([state[key]] if key in state else [])], default=None)
        if fewest is None:
            return (0.0,) * len(scored), state
        rewards = tuple(
            score.total * fit(trajectory.num_tool_calls, fewest, self.max_calls) for trajectory, score in scored
        )
        return rewards, state if state.get(key) == fewest else {**state, key: fewest}
