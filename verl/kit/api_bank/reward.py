"""API-Bank's rule as in ToolRL (arXiv 2504.13958): is the gold call among the response's calls?

    soft     any call of the response equals the gold call: the same name, and parameters equal by Python's `==`
    strict   the response makes exactly one call, and it equals the gold call

The calls are those parsed by the tool-call format. If it found none, `soft` checks the lines of ToolRL's block: lines
that are not JSON objects are skipped, and, as in ToolRL, an object without name or parameters is read as the parameters
of the gold call.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from verl.formats.toolrl_text import THINK_END, call_text
from verl.json_values import read_json
from verl.types import Score, Task, Trajectory


@dataclass(frozen=True)
class ApiBankReward:
    """Task.answer: JSON of the gold call, {"name": str, "parameters": object}. The total is `soft`."""

    reads_step: ClassVar[bool] = False

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        gold = _gold(task.answer)
        calls = trajectory.turns[-1].message.tool_calls if trajectory.turns else ()
        read = [{"name": call.name, "parameters": dict(call.arguments)} for call in calls]
        soft = any(call == gold for call in read or _calls_of_lines(trajectory.response, gold["name"]))
        return Score(float(soft), {"soft": float(soft), "strict": float(read == [gold])})


@lru_cache(maxsize=1024)
def _gold(answer: str) -> dict[str, Any]:
    found: dict[str, Any] = read_json(answer)
    return found


def _calls_of_lines(response: str, gold_name: str) -> Iterator[dict[str, Any]]:
    """Calls of the first ToolRL block after the thought, one per line."""
    for line in (call_text(response.rpartition(THINK_END)[2]) or "").split("\n"):
        try:
            call = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(call, dict) and "name" in call and "parameters" in call:
            yield {"name": call["name"], "parameters": call["parameters"]}
        elif isinstance(call, dict):
            yield {"name": gold_name, "parameters": call}
