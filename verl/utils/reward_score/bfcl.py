"""BFCL's verdict on the calls of one response: is each among those that the key accepts?

The key (Task.answer) is the package's ground truth as JSON: [{name: {parameter: [accepted values]}}, ..], where ""
among the values says that the parameter may be left out. [] is the key of a row on which no call is right, "any" that
of a row on which every call is. What functions take stands in Task.extra["tools"], in the words of JSON Schema.

Calls and key are paired without order: each entry takes the first call that is left and fits. Texts are equal without
case, blanks and ,./-_*^; a whole number does for a float; a value may have the type of the key's first value instead
of the documented one, and must then be equal. Names keep their dots: BFCL takes underscores for them from models whose
interface forbids dots alone, and no format here does. The verdicts equal those of `ast_checker` in bfcl-eval 2026.3.23,
oddities included ([] and "" do where a parameter may be left out).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from verl.errors import DataError
from verl.types import Score, Task, ToolCall, Trajectory

ANY_CALL = "any"
_TYPES: Mapping[str, type] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list,
    "object": dict,
}
_UNREAD = re.compile(r"[ ,./\-_*^]")
_HUGE = 10**308  # no float is larger


class Passed(IntEnum):
    """What of a call is right: this, and all that comes before it."""

    NOTHING = 0
    NAMES = 1
    PARAMETERS = 2  # none is missing, none invented
    TYPES = 3
    VALUES = 4


class BfclReward:
    """1 if all calls are right, else 0. Score.parts: correct, count, and the stages of `Passed` (1 if all got there).

    It reads the calls that the format found, so an episode needs one; a text alone is judged as a response without
    calls.
    """

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        """Judges the calls of the last turn. Raises DataError that names the task if its key cannot be read."""
        calls = trajectory.turns[-1].message.tool_calls if trajectory.turns else ()
        key = read_key(task)
        if key == ANY_CALL:
            return Score(float(bool(calls)), {"correct": float(bool(calls)), "count": float(bool(calls))})
        passed = [Passed.VALUES, *_passed(calls, key, {tool["name"]: tool for tool in task.extra["tools"]})]
        correct = len(calls) == len(key) and min(passed) is Passed.VALUES
        parts = {stage.name.lower(): float(min(passed) >= stage) for stage in Passed if stage}
        return Score(float(correct), {"correct": float(correct), "count": float(len(calls) == len(key)), **parts})


def read_key(task: Task) -> Any:
    """ANY_CALL, or a list of (name, {parameter: accepted values}). Raises DataError for anything else."""
    try:
        key = json.loads(task.answer)
        if key == ANY_CALL:
            return key
        pairs = [(name, dict(accepted)) for entry in key for name, accepted in entry.items()]
        known = {tool["name"] for tool in task.extra["tools"]}
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        expected = '[{name: {parameter: [values]}}, ..] or "any", and extra["tools"]'
        raise DataError(f"no key of BFCL ({error!r})", expected, file=task.id, field="answer") from error
    if strange := [name for name, _ in pairs if name not in known]:
        raise DataError(f"the key calls {strange[0]!r}", f"one of {sorted(known)}", file=task.id, field="answer")
    return pairs


def _passed(calls: Sequence[ToolCall], key: Any, tools: Mapping[str, Any]) -> list[Passed]:
    """How far the best call for each entry of the key gets; those that are right are used up."""
    left = list(calls)
    found = []
    for name, accepted in key:
        stages = [_judge(call, name, accepted, tools[name]["parameters"]) for call in left]
        found.append(max(stages, default=Passed.NOTHING))
        if Passed.VALUES in stages:
            del left[stages.index(Passed.VALUES)]
    return found


def _judge(call: ToolCall, name: str, accepted: Mapping[str, Any], schema: Mapping[str, Any]) -> Passed:
    if call.name != name:
        return Passed.NOTHING
    known, given = schema["properties"], call.arguments
    needed = {*schema.get("required", ()), *(each for each, values in accepted.items() if "" not in values)}
    if not (needed <= given.keys() <= known.keys() & accepted.keys()):
        return Passed.NAMES
    values = [_Value(value, accepted[each], known[each]) for each, value in given.items()]
    if not all(value.type_fits() for value in values):
        return Passed.PARAMETERS
    return Passed.VALUES if all(value.is_accepted() for value in values) else Passed.TYPES


class _Value:
    """An argument beside what is accepted for it."""

    def __init__(self, value: Any, accepted: Sequence[Any], schema: Mapping[str, Any]) -> None:
        self._kind, self._accepted = _type_of(schema), accepted
        self._inner = _type_of(schema["items"]) if self._kind is list and "items" in schema else None
        whole = self._kind is float and type(value) is int and abs(value) < _HUGE
        self._value: Any = float(value) if whole else value

    def type_fits(self) -> bool:
        """The documented type, or that of the key. Of a list every item, too, but no deeper."""
        if self._inner is None or not isinstance(self._value, list):
            return _fits(self._value, self._kind, self._accepted)
        return any(
            not isinstance(option, list) or all(_fits(item, self._inner, option) for item in self._value)
            for option in self._accepted
        )

    def is_accepted(self) -> bool:
        """Whether a value whose type fits is one of the accepted ones."""
        value, accepted = self._value, self._accepted
        if _key_type(accepted) not in (None, self._kind):
            return value in accepted
        if self._kind is dict:
            return any(isinstance(option, dict) and _dict_fits(value, option) for option in accepted)
        if self._kind is list and self._inner is dict:
            return any(isinstance(option, list | str) and _dicts_fit(value, option) for option in accepted)
        if self._kind is list:
            return _read(value) in [_read(option) for option in accepted]
        return _standard(value) in [_standard(option) for option in accepted]


def _type_of(schema: Mapping[str, Any]) -> type:
    """The Python type of a schema's values; what may be anything is a text, as in BFCL."""
    return _TYPES[schema["type"]] if "type" in schema else str


def _fits(value: Any, kind: type, accepted: Sequence[Any]) -> bool:
    return type(value) is kind or type(value) is _key_type(accepted)


def _key_type(accepted: Sequence[Any]) -> type | None:
    """The type of the first accepted value; None where there is none."""
    return next((type(option) for option in accepted if option != ""), None)


def _dict_fits(value: Mapping[str, Any], accepted: Mapping[str, Any]) -> bool:
    """As with parameters: no key that is not accepted, none left out that may not be. Deeper values must be equal."""
    known = all(
        key in accepted and _standard(each) in [_standard(option) for option in accepted[key]]
        for key, each in value.items()
    )
    return known and all(key in value or "" in options for key, options in accepted.items())


def _dicts_fit(values: Sequence[Any], accepted: Sequence[Any]) -> bool:
    """In this order."""
    return len(values) == len(accepted) and all(
        isinstance(value, dict) and isinstance(option, dict) and _dict_fits(value, option)
        for value, option in zip(values, accepted, strict=True)
    )


def _read(option: Any) -> Any:
    """The list with its texts as they are compared; "", for a parameter that may be left out, is read as []."""
    return [_standard(each) for each in option] if isinstance(option, list | str) else option


def _standard(value: Any) -> Any:
    """A text as it is compared; other values as they are."""
    return _UNREAD.sub("", value).lower().replace("'", '"') if isinstance(value, str) else value
