"""API-Bank's rule as in ToolRL (arXiv 2504.13958): is the gold call among the response's calls?

    soft     any call of the response equals the gold call: the same name, and parameters equal by Python's `==`
    strict   the response makes exactly one call, and it equals the gold call

On ToolRL's own rows `soft` is exactly its rule, for any text: the last `<tool_call>` piece counts, in a thought or not,
or the whole text without that tag, line by line. For other handlers the calls are those of the tool-call format, and
ToolRL's rule if it found none.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from verl.errors import DataError
from verl.formats.toolrl_text import TOOL_CALL, TOOL_CALL_END
from verl.json_values import read_json
from verl.types import GROUND_TRUTH, Score, Task, Trajectory


@dataclass(frozen=True)
class ApiBankReward:
    """Task.answer: JSON of the gold call, {"name": str, "parameters": object}. The total is `soft`."""

    reads_step: ClassVar[bool] = False

    def check_task(self, task: Task) -> None:
        """Raises DataError for a gold call that cannot be parsed."""
        _gold(task.answer)

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        gold = _gold(task.answer)
        calls = trajectory.turns[-1].message.tool_calls if trajectory.turns else ()
        read = [{"name": call.name, "parameters": dict(call.arguments)} for call in calls]
        own = "tools" in task.extra  # tools that a format lists and whose calls it reads
        soft = gold in read if own and read else _any_line_is(gold, trajectory.response)
        return Score(float(soft), {"soft": float(soft), "strict": float(read == [gold])})


@lru_cache(maxsize=1024)
def _gold(answer: str) -> dict[str, Any]:
    try:
        gold = read_json(answer)
    except (ValueError, RecursionError):
        gold = None
    if not isinstance(gold, dict) or not {"name", "parameters"} <= gold.keys():
        expected = 'a JSON object {"name": text, "parameters": object}'
        raise DataError(f"the gold call is {answer[:80]!r}", expected, field=GROUND_TRUTH)
    return gold


def _any_line_is(gold: dict[str, Any], response: str) -> bool:
    """ToolRL's rule. Lines that are not JSON are skipped. An object without name or parameters is taken as the
    parameters of the gold call. A number, truth value or null, which has no keys, ends the search."""
    piece = response.rpartition(TOOL_CALL)[2].partition(TOOL_CALL_END)[0]
    for line in piece.strip().split("\n"):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        try:
            call = json.loads(value) if isinstance(value, str) else value
            whole = "name" in call and "parameters" in call
            name, parameters = (call["name"], call["parameters"]) if whole else (gold["name"], call)
        except (TypeError, ValueError, RecursionError):
            return False
        if name == gold["name"] and parameters == gold["parameters"]:
            return True
    return False
