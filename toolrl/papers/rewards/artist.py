"""ARTIST's composite rewards (arXiv 2505.01441). No code is public and sources differ on the constants, so all of them
are options; the defaults are the most common values.

Mathematics: answer + format + execution
    answer       2 if it is right
    format       up to 0.5: half for the tags (share of think and answer that are opened and closed), half for the
                 strict order thought, code, output, .. , thought, answer
    execution    successful calls / calls; `no_calls` without any call

Function calls: state + functions + format
    state        0.5 * share of state variables with the right final value
    functions    0.5 * share of the gold calls that were made; the environment reports both in its score's parts
    format       up to 0.5: share of turns that begin with a closed thought

The reward lab does not support these: the maximum requires an episode with successful calls, not just a text.
"""

from dataclasses import dataclass
from typing import ClassVar

from toolrl.reward_score.answers import follows_cycle, last_answer
from toolrl.reward_score.math import last_box
from toolrl.reward_score.math_equality import same_answer
from verl.errors import ConfigError
from verl.types import Score, Task, ToolStatus, Trajectory
from verl.utils.reward_score.base import written


@dataclass(frozen=True)
class ArtistMathReward:
    """Options: the weights of the three parts, the third part of an episode without calls, the tags."""

    reads_step: ClassVar[bool] = False

    answer: float = 2.0
    format: float = 0.5
    execution: float = 1.0
    no_calls: float = 0.0  # sources differ: with 0, a right answer without code scores less than one with code
    code_tag: str = "python"
    output_tag: str = "output"

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        response = written(trajectory)
        answered = last_answer(response)
        answer = answered and (last_box(answered) or answered)
        ordered = follows_cycle(trajectory, self.code_tag, self.output_tag)
        paired = sum(0 < response.count(f"<{tag}>") == response.count(f"</{tag}>") for tag in ("think", "answer"))
        uses = trajectory.tool_uses
        succeeded = sum(use.status is ToolStatus.SUCCESS for use in uses)
        parts = {
            "answer": self.answer * bool(answer and same_answer(answer, task.answer)),
            "format": self.format * (0.5 * (paired / 2) + 0.5 * ordered),
            "execution": self.execution * (succeeded / len(uses) if uses else self.no_calls),
        }
        return Score(sum(parts.values()), parts)


@dataclass(frozen=True)
class ArtistToolsReward:
    """Options: the weights of the three parts."""

    reads_step: ClassVar[bool] = False

    state: float = 0.5
    functions: float = 0.5
    format: float = 0.5

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        """Raises ConfigError if the environment does not judge, or not with these parts."""
        judged = {} if trajectory.score is None else trajectory.score.parts
        if not {"state", "functions"} <= judged.keys():
            raise ConfigError('reward artist_tools needs an environment whose score has parts "state" and "functions"')
        texts = [turn.message.content.lstrip() for turn in trajectory.turns]
        thinking = sum(text.startswith("<think>") and "</think>" in text for text in texts)
        parts = {
            "state": self.state * judged["state"],
            "functions": self.functions * judged["functions"],
            "format": self.format * thinking / max(1, len(texts)),
        }
        return Score(sum(parts.values()), parts)
