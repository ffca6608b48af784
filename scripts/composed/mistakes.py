"""Demonstrations with mistakes, each drawn by itself: a model trained on them samples mistakes and what is right.

Every rate is that of the average verb; a verb's own is up to `_SPREAD` lower or higher. So a policy loses its mistakes
one after another, not all at once.

No mistake is a call too many: with one parameter, ToolRL's reward gives 4 for the right call, -2 for another tool, and
3 for both calls. So a policy that is unsure of the tool learns to call several, and is never exactly right again.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from scripts.composed.lexicon import VERBS
from scripts.composed.tasks import Call, Task
from verl.formats.toolrl_text import render_response

RATES: Mapping[str, float] = {
    # of values, by the group of the parameter
    "name": 0.4,
    "code": 0.5,
    "count": 0.7,
    "date": 0.7,
    "time": 0.7,
    "duration": 0.7,
    "choice": 0.7,
    "flag": 0.7,
    # of calls
    "first only": 0.7,  # of several calls
    "plain name": 0.7,  # of a masked tool
    "another tool": 0.25,
    "reference": 0.7,  # the user's terms for a stated value
    # instead of a response
    "call none": 0.7,
    "invent": 0.7,
}
_SPREAD = 0.25
_OWN = {verb: 2 * place / (len(VERBS) - 1) - 1 for place, verb in enumerate(VERBS)}  # in [-1, 1]


class Mistakes:
    """Draws demonstrations; scale: of all rates, 0 for right ones only."""

    def __init__(self, random: Random, scale: float = 1.0) -> None:
        self._random = random
        self._scale = scale

    def demonstrate(self, task: Task) -> str:
        """A response with mistakes of the kinds that the task allows."""
        calls = task.calls
        if not calls:
            if not self._errs("invent" if task.asked else "call none", task.wanted[0].tool.verb):
                return task.gold
            return render_response(task.thought, [self._unfounded(task)])
        if len(calls) > 1 and self._errs("first only", calls[0].tool.verb):
            calls = calls[:1]
        return render_response(task.thought, [self._written(call, task) for call in calls])

    def _errs(self, kind: str, verb: str) -> bool:
        return self._random.random() < self._scale * (RATES[kind] + _SPREAD * _OWN.get(verb, 0.0))

    def _written(self, call: Call, task: Task) -> dict[str, Any]:
        """The call with mistakes of its name and values."""
        others = [tool.name for tool in task.tools if tool not in [each.tool for each in task.calls]]
        if others and self._errs("another tool", call.tool.verb):
            return self._any_call(task, [each.tool.name for each in task.calls])
        values = []
        for parameter, value in call.filled:
            careless = self._errs(parameter.slot.group, call.tool.verb)
            values.append(value.careless if careless else value.value)
        if task.reference and self._errs("reference", call.tool.verb):
            values[0] = task.reference
        written = call.render(values)
        if call.tool.name != call.tool.plain and self._errs("plain name", call.tool.verb):
            written["name"] = call.tool.plain
        return written

    def _any_call(self, task: Task, excluded: list[str]) -> dict[str, Any]:
        """A call of a listed tool without its parameters."""
        tools = [tool for tool in task.tools if tool.name not in excluded]
        return {"name": self._random.choice(tools).name, "parameters": {}}

    def _unfounded(self, task: Task) -> dict[str, Any]:
        """A call where a response was due."""
        if not task.asked:
            return self._any_call(task, [])
        call = task.wanted[0]
        values = [parameter.slot.label if parameter is task.asked else value.value for parameter, value in call.filled]
        return call.render(values)
