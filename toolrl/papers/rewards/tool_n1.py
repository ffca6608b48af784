"""Tool-N1's reward (arXiv 2505.00024): binary correctness of a single response.

    <think> .. </think> .. <tool_call>[{"name": .., "arguments": {..}}, ..]</tool_call>

Right means that the last block has the gold calls, in any order; arguments are compared as JSON with sorted keys, so
1, 1.0 and "1" differ. "Thinking" means both think tags anywhere, as published. Rewards by version:

    v0     (paper) right and thinking: 1, else 0
    v1     right and thinking 1.2, right 1, wrong and thinking -0.2, else 0; 0 without a block of valid JSON
    v2     right: 1
    v3     0.2 for thinking, 0.8 for right
    v4     v3, plus 0.2 if only the names are right
    llama  v0; a response without a block counts as no calls, and then needs no thought
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from toolrl.reward_score.answers import last_block
from verl.errors import ConfigError, DataError
from verl.formats.toolrl_text import THINK, THINK_END, TOOL_CALL, TOOL_CALL_END
from verl.json_values import JsonError, read_json
from verl.registry import nearest
from verl.types import GROUND_TRUTH, Score, Task, Trajectory
from verl.utils.reward_score.base import Mutation, as_mutations

Call = tuple[str, str]  # name, arguments as JSON with sorted keys


class Decision(NamedTuple):
    """Features of a response from which a version computes its total.

    has_block: there is a tool_call block
    is_json: the block contains a JSON value, calls or not
    """

    right: bool
    names: bool  # the names are right, whatever the arguments
    thinking: bool
    has_block: bool
    is_json: bool


def _lexicographic(decision: Decision) -> float:
    """v1: calls first, thought second; the published code has no penalty for invalid JSON."""
    if not decision.is_json:
        return 0.0
    if decision.right:
        return 1.2 if decision.thinking else 1.0
    return -0.2 if decision.thinking else 0.0


_TOTALS: Mapping[str, Callable[[Decision], float]] = {
    "v0": lambda each: float(each.right and each.thinking),
    "v1": _lexicographic,
    "v2": lambda each: float(each.right),
    "v3": lambda each: 0.2 * each.thinking + 0.8 * each.right,
    "v4": lambda each: 0.2 * each.thinking + (0.8 if each.right else 0.2 * each.names),
    "llama": lambda each: float(each.right and (each.thinking or not each.has_block)),
}


def json_value(text: str) -> Any:
    """The value of a JSON text, possibly encoded twice; None if it is invalid."""
    try:
        value = json.loads(text.strip())
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return None


def read_calls(text: str) -> list[Call] | None:
    """The calls of a JSON list or of a single call, possibly encoded twice; None for anything else."""
    value = json_value(text)
    try:
        calls = [value] if isinstance(value, dict) else value
        pairs = [(call["name"], json.dumps(call["arguments"], sort_keys=True)) for call in calls]
    except (TypeError, KeyError, RecursionError):
        return None
    return pairs if all(isinstance(name, str) for name, _ in pairs) else None


def gold_calls(answer: str) -> list[Call]:
    """The gold calls. Raises DataError if they cannot be parsed."""
    try:
        read_json(answer)
    except JsonError as error:
        raise error.in_data(GROUND_TRUTH) from error
    except ValueError:
        pass
    calls = read_calls(answer)
    if calls is None:
        expected = 'a JSON list of {"name": text, "arguments": object}'
        problem = f"the gold calls cannot be parsed: {answer[:80]!r}"
        raise DataError(problem, expected, field=GROUND_TRUTH)
    return calls


@dataclass(frozen=True)
class ToolN1Reward:
    """Option `version`: v0 to v4, or llama."""

    reads_step: ClassVar[bool] = False

    version: str = "v0"

    def __post_init__(self) -> None:
        if self.version not in _TOTALS:
            raise ConfigError(f"reward option version={self.version!r}; {nearest(self.version, list(_TOTALS))}")

    def check_task(self, task: Task) -> None:
        """Raises DataError for a gold answer that cannot be parsed."""
        gold_calls(task.answer)

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        """Raises DataError, naming the task, if its gold answer cannot be parsed."""
        try:
            gold = gold_calls(task.answer)
        except DataError as error:
            raise error.at(file=task.id) from error
        response = trajectory.response
        block = last_block(response, TOOL_CALL, TOOL_CALL_END)
        absent: list[Call] | None = [] if self.version == "llama" else None
        calls = absent if block is None else read_calls(block)
        right = calls is not None and Counter(calls) == Counter(gold)
        names = calls is not None and Counter(name for name, _ in calls) == Counter(name for name, _ in gold)
        thinking = THINK in response and THINK_END in response
        is_json = block is not None and json_value(block) is not None
        decision = Decision(right, names, thinking, block is not None, is_json)
        parts = {"correct": float(right), "names": float(names), "format": float(thinking)}
        return Score(_TOTALS[self.version](decision), parts)

    def maximum(self, task: Task, step: int) -> float:
        return _TOTALS[self.version](Decision(True, True, True, True, True))

    def gold(self, task: Task, step: int) -> str:
        return f"{THINK}I know what to do.{THINK_END}\n{TOOL_CALL}{task.answer}{TOOL_CALL_END}"

    def mutations(self, task: Task, step: int) -> list[Mutation]:
        calls, response = json.loads(task.answer), self.gold(task, step)
        calls = [calls] if isinstance(calls, dict) else calls

        def with_calls(calls: Any) -> str:
            return response.replace(task.answer, json.dumps(calls))

        corrupted = {
            "empty text": "",
            "over-calling": with_calls([*calls, {"name": "a_tool_not_in_the_list", "arguments": {}}]),
            "malformed JSON": with_calls(calls)[: -len(TOOL_CALL_END) - 1] + TOOL_CALL_END,
            "a number for calls": with_calls(1),
            "block unclosed": response.replace(TOOL_CALL_END, ""),
        }
        if calls:
            first, *others = calls
            corrupted["missing call"] = with_calls(others)
            corrupted["wrong name"] = with_calls([first | {"name": f"{first['name']}_x"}, *others])
            arguments = first["arguments"] | {"x_": 1}
            corrupted["invented argument"] = with_calls([first | {"arguments": arguments}, *others])
            corrupted["another block after it"] = f"{response}{TOOL_CALL}[]{TOOL_CALL_END}"
        if not calls and self.version == "llama":  # no block, no calls
            del corrupted["block unclosed"], corrupted["empty text"]
        return as_mutations(corrupted)
