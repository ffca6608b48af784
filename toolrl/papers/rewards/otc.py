"""OTC-PO's rewards (arXiv 2504.14870), reward shaping by tool use: a right answer with fewer tool calls scores more.

m: calls of a trajectory; n: minimum calls of any right trajectory for the question so far; c: smoothing, the maximum
number of calls; a: scale; r_phi: correctness in {0, 1} (with -1 for wrong answers the product would reward them for
many calls), plus optional `format` points.

    R = a * r_tool * r_phi
    OTC-PPO    r_tool = cos(m pi / (2 m + c))
    OTC-GRPO   r_tool = sin(f pi / (2 n)) with f = 2 n m / (n + m); for n = 0 the cosine above
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import cos, pi, sin
from typing import Any, ClassVar

from toolrl.reward_score.answers import answer_response, corrupted_answers, episode_text, exact_match, follows_cycle
from toolrl.reward_score.math import boxed, corrupted_boxes, last_box, math_correct
from toolrl.reward_score.number import NumberReward, last_number
from verl.errors import ConfigError
from verl.text import prompt_sha256
from verl.types import Score, Task, Trajectory, TrajectoryGroup
from verl.utils.reward_score.base import Mutation, as_mutations, written

_NUMBERS = NumberReward()


def frugality(calls: int, smoothing: float) -> float:
    """OTC-PPO's r_tool: 1 without calls, decreasing to 0; faster for smaller `smoothing` (c > 0)."""
    return cos(calls * pi / (2 * calls + smoothing))


def fit(calls: int, fewest: int, smoothing: float) -> float:
    """OTC-GRPO's r_tool: 1 at exactly `fewest` calls, less on both sides; sin(pi m / (m + n)) for n > 0."""
    return sin(pi * calls / (calls + fewest)) if fewest else frugality(calls, smoothing)


@dataclass(frozen=True)
class _OtcReward:
    """Options: answer type (math: a box; search: an answer block; number: the last one, as `reward.name=number` reads
    it), c (`max_calls`), a (`scale`), `format`.

    format: points of r_phi for the right format. Search: thought, call, observation, .. , thought, answer; math: a box;
    number: one in the last turn
    """

    reads_step: ClassVar[bool] = False

    answers: str = "search"  # search | math | number
    max_calls: float = 4.0
    scale: float = 1.0
    format: float = 0.0

    def __post_init__(self) -> None:
        if self.answers not in ("search", "math", "number"):
            raise ConfigError(f"reward option answers must be search, math or number, got {self.answers!r}")
        for name in ("max_calls", "scale"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"reward option {name} must be positive, got {getattr(self, name)!r}")
        if self.format < 0:
            raise ConfigError(f"reward option format must be 0 or more, got {self.format!r}")

    def check_task(self, task: Task) -> None:
        """Raises DataError if the gold answer should be a number and is none."""
        if self.answers == "number":
            _NUMBERS.check_task(task)

    def parts(self, trajectory: Trajectory, task: Task) -> dict[str, float]:
        """The summands of r_phi."""
        if self.answers == "math":
            response = written(trajectory)
            correct, form = math_correct(response, task.answer), last_box(response) is not None
        elif self.answers == "number":
            correct = _NUMBERS.score(trajectory, task, 0).total == 1.0
            form = bool(trajectory.turns) and last_number(trajectory.turns[-1].message.content) is not None
        else:
            correct = exact_match(episode_text(trajectory), task.answer)
            form = follows_cycle(trajectory, "search", "observation")
        parts = {"correct": float(correct)}
        return parts | {"format": self.format * form} if self.format else parts

    def maximum(self, task: Task, step: int) -> float:
        return self.scale * (1.0 + self.format)

    def gold(self, task: Task, step: int) -> str:
        if self.answers == "number":
            return _NUMBERS.gold(task, step)
        return boxed(task.answer) if self.answers == "math" else answer_response(task.answer)

    def mutations(self, task: Task, step: int) -> list[Mutation]:
        if self.answers == "number":
            return _NUMBERS.mutations(task, step)
        return as_mutations((corrupted_boxes if self.answers == "math" else corrupted_answers)(task.answer))


@dataclass(frozen=True)
class OtcPpoReward(_OtcReward):
    """OTC-PPO: scores each trajectory independently."""

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        parts, tool = self.parts(trajectory, task), frugality(trajectory.num_tool_calls, self.max_calls)
        return Score(self.scale * tool * sum(parts.values()), {**parts, "frugality": tool})


@dataclass(frozen=True)
class OtcGrpoReward(_OtcReward):
    """OTC-GRPO: reward shaping by the minimum calls of any right trajectory so far, including this group.

    The state maps questions to n, which never increases. Before the first right answer n is unknown and r_tool is 1, so
    only the format is rewarded, if at all. The unshaped score, as in validation, is a * r_phi.
    """

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        parts = self.parts(trajectory, task)
        return Score(self.scale * sum(parts.values()), parts)

    def shape(self, group: TrajectoryGroup, state: Mapping[str, Any]) -> tuple[tuple[float, ...], Mapping[str, Any]]:
        key = prompt_sha256(group.task.prompt)  # ids may collide between files
        scored = list(zip(group.trajectories, group.scores, strict=True))
        seen = [trajectory.num_tool_calls for trajectory, score in scored if score.parts["correct"]]
        fewest = min([*seen, *([state[key]] if key in state else [])], default=None)
        if fewest is None:
            return tuple(score.total for score in group.scores), state
        rewards = [score.total * fit(each.num_tool_calls, fewest, self.max_calls) for each, score in scored]
        return tuple(rewards), state if state.get(key) == fewest else {**state, key: fewest}
