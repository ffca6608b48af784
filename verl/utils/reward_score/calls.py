"""ToolRL's reward for any tool-call format: the parsed calls of a response against those of the row's assistant turn.

    format       1 if the response parses, makes calls if and only if the gold turn does, and is complete: it has a call
                 or an answer, after a thought if the format demands one; else 0
    correctness  -3 .. 3 by agreement of the calls with the gold calls, as in rlla.py; 0 if the gold turn makes none
    length       0 .. 1 by the word count of the think block, if enabled

Values are compared as JSON: true equals no number, but 1 equals 1.0, for JSON has one type of number. `values=python`
is ToolRL's rule, Python's `==`, by which true equals 1, too. Other options and their defaults are those of rlla. A
response that is cut off at a token limit counts as one that does not parse. In an episode of several turns the first
one is scored: it is the one that the gold turn answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, ClassVar, Literal

from verl.errors import ConfigError, DataError
from verl.formats.toolrl_text import THINK, THINK_END, listed_tools
from verl.types import Message, ParsedResponse, Score, Task, ToolCall, Trajectory
from verl.utils.reward_score.base import Mutation
from verl.utils.reward_score.matching import Call
from verl.utils.reward_score.rlla import (
    RllaOptions,
    calls_score,
    correctness_range,
    format_range,
    full_length,
    length_score,
    maximum_score,
)
from verl.utils.reward_score.rlla_mutations import STRANGER, corrupted_calls, lengthen_thought


class CallsReward:
    """values: how arguments are compared; options: of RllaOptions, in place of the environment's toggles"""

    reads_calls: ClassVar[bool] = True

    def __init__(self, values: Literal["json", "python"] = "json", **options: Any) -> None:
        if values not in ("json", "python"):
            raise ConfigError(f"reward option values must be json or python, got {values!r}")
        self._read = _typed_calls if values == "json" else calls_as_json
        self.options = RllaOptions.from_env(overrides=options)
        self.reads_step = self.options.follows_schedule

    def check_task(self, task: Task) -> None:
        """Raises DataError if the task has no gold turn."""
        gold_turn(task)

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        """Raises DataError, naming the task, if it has no gold turn."""
        gold = gold_turn(task)
        parsed, text = None, ""
        if trajectory.turns:
            parsed, text = trajectory.turns[0].parsed, trajectory.turns[0].message.content
        ends = format_range(self.options, step)
        parts = {
            "format": ends.high if _has_form_of(gold, parsed) else ends.low,
            "correctness": self._correctness(gold, parsed, step),
            "length": length_score(text, self.options, step),
        }
        return Score(sum(parts.values()), parts)

    def _correctness(self, gold: Message, parsed: ParsedResponse | None, step: int) -> float:
        if not gold.tool_calls:
            called = parsed is not None and (parsed.calls or parsed.error is not None)
            return -self.options.unwanted_call_penalty if called else 0.0
        lowest = correctness_range(self.options, step).low
        if parsed is None or not parsed.calls:
            return lowest
        try:
            return calls_score(self._read(gold.tool_calls), self._read(parsed.calls), self.options, step)
        except RecursionError:  # arguments nested by the hundred
            return lowest

    def maximum(self, task: Task, step: int) -> float:
        return maximum_score(self.options, step, bool(gold_turn(task).tool_calls))

    def gold(self, task: Task, step: int) -> Message:
        """The gold turn, without text beside its calls, and with a long enough thought if length is rewarded."""
        gold = gold_turn(task)
        content = gold.content if THINK in gold.content or not gold.tool_calls else ""
        if self.options.scores_length:
            thoughtful = content if THINK in content else f"{THINK} {THINK_END}\n{content}"
            content = lengthen_thought(thoughtful, full_length(self.options, step))
        return _with_content(gold, content)

    def mutations(self, task: Task, step: int) -> list[Mutation]:
        gold = self.gold(task, step)
        if not gold.tool_calls:
            strange = Message("assistant", "", _as_calls([STRANGER]), calls_in_content=False)
            return [Mutation("over-calling", strange), Mutation("empty text", "")]
        answer = replace(_with_content(gold, "I cannot do that."), tool_calls=())
        tools = [tool.name for tool in task.tools] or listed_tools(task.prompt) or ()
        wrong = corrupted_calls(calls_as_json(gold.tool_calls), tools)
        mutations = [Mutation(name, replace(gold, tool_calls=_as_calls(calls))) for name, calls in wrong]
        return [Mutation("no call", answer), Mutation("empty text", ""), *mutations]


def gold_turn(task: Task) -> Message:
    """The assistant turn to reproduce. Raises DataError if the task has none, or an empty one."""
    if task.gold is None or not (task.gold.tool_calls or task.gold.content.strip()):
        raise DataError(
            "has no assistant turn at its end, which reward.name=calls compares responses with",
            "messages that end with the assistant's gold turn: tool_calls, or an answer in content",
            file=task.id,
            field="messages",
        )
    return task.gold


def _has_form_of(gold: Message, parsed: ParsedResponse | None) -> bool:
    if parsed is None or parsed.error is not None or not parsed.complete:
        return False
    return bool(parsed.calls) == bool(gold.tool_calls)


def _with_content(message: Message, content: str) -> Message:
    fields = {key: value for key, value in message.template_fields.items() if key != "content" or not content}
    return replace(message, content=content, template_fields=fields)


def calls_as_json(calls: Sequence[ToolCall]) -> list[Call]:
    return [{"name": call.name, "parameters": dict(call.arguments)} for call in calls]


class _Truth(Enum):
    """JSON's true and false: equal to no number."""

    FALSE = False
    TRUE = True


def _typed_calls(calls: Sequence[ToolCall]) -> list[Call]:
    return [{"name": call.name, "parameters": _typed(call.arguments)} for call in calls]


def _typed(value: Any) -> Any:
    if isinstance(value, bool):
        return _Truth(value)
    if isinstance(value, Mapping):
        return {key: _typed(each) for key, each in value.items()}
    return [_typed(each) for each in value] if isinstance(value, list | tuple) else value


def _as_calls(calls: Sequence[Call]) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(call["name"], call["parameters"]) for call in calls)
