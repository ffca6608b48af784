"""BFCL's check of the calls of one response: is each call among those that the answer key accepts?

The key (Task.answer) is the package's ground truth as JSON: [{name: {parameter: [accepted values]}}, ..], where ""
among the values means that the parameter is optional. [] is the key of a row on which no call is right, "any" that of a
row on which every call is. Task.extra["tools"] has the functions' parameters as JSON Schema.

Calls and key are paired in any order: each entry takes the first unused call that fits. Texts are compared without
case, blanks and ,./-_*^; an integer is accepted for a float; a value may have the type of the key's first value instead
of the documented one, and must then be equal. Names keep their dots: BFCL accepts underscores instead only for models
whose interface forbids dots, and no format here does. Results equal those of `ast_checker` in bfcl-eval 2026.3.23,
including its oddities ([] and "" are accepted for optional parameters).
"""

import re
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, ClassVar

from verl.errors import DataError
from verl.json_values import read_json
from verl.types import Score, Task, ToolCall, Trajectory

ANY_CALL = "any"
_TYPES = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list, "object": dict}
_UNREAD = re.compile(r"[ ,./\-_*^]")
_HUGE = 10**308  # no float is larger


class Passed(IntEnum):
    """The last check that a call passes; the checks are ordered."""

    NOTHING = 0
    NAMES = 1
    PARAMETERS = 2  # none missing, none invented
    TYPES = 3
    VALUES = 4


class BfclReward:
    """1 if all calls are right, else 0. Score.parts: correct, count, and the stages of `Passed` (1 if all pass it).

    It scores the calls parsed by the tool-call format, which an episode therefore needs; a plain text is scored as a
    response without calls.
    """

    reads_step: ClassVar[bool] = False

    def check_task(self, task: Task) -> None:
        """Raises DataError for a key that cannot be parsed."""
        read_key(task)

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        """Scores the calls of the last turn. Raises DataError, naming the task, if its key cannot be parsed."""
        calls = trajectory.turns[-1].message.tool_calls if trajectory.turns else ()
        key = read_key(task)
        if key == ANY_CALL:
            return Score(float(bool(calls)), {"correct": float(bool(calls)), "count": float(bool(calls))})
        passed = [Passed.VALUES, *_passed_calls(calls, key, {tool["name"]: tool for tool in task.extra["tools"]})]
        correct = len(calls) == len(key) and min(passed) is Passed.VALUES
        parts = {stage.name.lower(): float(min(passed) >= stage) for stage in Passed if stage}
        return Score(float(correct), {"correct": float(correct), "count": float(len(calls) == len(key)), **parts})


def read_key(task: Task) -> Any:
    """ANY_CALL, or a list of (name, {parameter: accepted values}). Raises DataError for anything else."""
    try:
        key = read_json(task.answer)
        if key == ANY_CALL:
            return key
        pairs = [(name, dict(accepted)) for entry in key for name, accepted in entry.items()]
        known = {tool["name"] for tool in task.extra["tools"]}
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        expected = '[{name: {parameter: [values]}}, ..] or "any", and extra["tools"]'
        raise DataError(f"not a BFCL key ({error!r})", expected, file=task.id, field="answer") from error
    if strange := [name for name, _ in pairs if name not in known]:
        raise DataError(f"the key calls {strange[0]!r}", f"one of {sorted(known)}", file=task.id, field="answer")
    return pairs


def _passed_calls(calls: Sequence[ToolCall], key: Any, tools: Mapping[str, Any]) -> list[Passed]:
    """The last check passed by the best call for each entry of the key; a right call is used only once."""
    left = list(calls)
    passed = []
    for name, accepted in key:
        stages = [_judge(call, name, accepted, tools[name]["parameters"]) for call in left]
        passed.append(max(stages, default=Passed.NOTHING))
        if Passed.VALUES in stages:
            del left[stages.index(Passed.VALUES)]
    return passed


def _judge(call: ToolCall, name: str, accepted: Mapping[str, Any], schema: Mapping[str, Any]) -> Passed:
    if call.name != name:
        return Passed.NOTHING
    known, arguments = schema["properties"], call.arguments
    needed = {*schema.get("required", ()), *(each for each, values in accepted.items() if "" not in values)}
    if not (needed <= arguments.keys() <= known.keys() & accepted.keys()):
        return Passed.NAMES
    values = [_Value(value, accepted[each], known[each]) for each, value in arguments.items()]
    if not all(value.type_fits() for value in values):
        return Passed.PARAMETERS
    return Passed.VALUES if all(value.is_accepted() for value in values) else Passed.TYPES


class _Value:
    def __init__(self, value: Any, accepted: Sequence[Any], schema: Mapping[str, Any]) -> None:
        self._kind, self._accepted = _type_of(schema), accepted
        self._inner = _type_of(schema["items"]) if self._kind is list and "items" in schema else None
        whole = self._kind is float and type(value) is int and abs(value) < _HUGE
        self._value: Any = float(value) if whole else value

    def type_fits(self) -> bool:
        """True if the value has the documented type or that of the key. List items are checked, one level deep."""
        if self._inner is None or not isinstance(self._value, list):
            return _fits(self._value, self._kind, self._accepted)
        return any(
            not isinstance(option, list) or all(_fits(item, self._inner, option) for item in self._value)
            for option in self._accepted
        )

    def is_accepted(self) -> bool:
        value, accepted = self._value, self._accepted
        if _key_type(accepted) not in (None, self._kind):
            return value in accepted
        if self._kind is dict:
            return any(_dict_fits(value, option) for option in accepted)
        if self._kind is list and self._inner is dict:  # pairwise, in this order
            return any(
                isinstance(option, list | str) and len(value) == len(option) and all(map(_dict_fits, value, option))
                for option in accepted
            )
        if self._kind is list:
            return _read(value) in [_read(option) for option in accepted]
        return _standard(value) in [_standard(option) for option in accepted]


def _type_of(schema: Mapping[str, Any]) -> type:
    """The Python type of a schema's values; a schema without a type is a text, as in BFCL."""
    return _TYPES[schema["type"]] if "type" in schema else str


def _fits(value: Any, kind: type, accepted: Sequence[Any]) -> bool:
    return type(value) is kind or type(value) is _key_type(accepted)


def _key_type(accepted: Sequence[Any]) -> type | None:
    """The type of the first accepted value; None if there is none."""
    return next((type(option) for option in accepted if option != ""), None)


def _dict_fits(value: Any, accepted: Any) -> bool:
    """As for parameters: no unknown key, no required key missing. Deeper values must be equal."""
    if not (isinstance(value, dict) and isinstance(accepted, dict)):
        return False
    known = all(
        key in accepted and _standard(each) in [_standard(option) for option in accepted[key]]
        for key, each in value.items()
    )
    return known and all(key in value or "" in options for key, options in accepted.items())


def _read(option: Any) -> Any:
    """The list with standardized texts; "", for an optional parameter, is read as []."""
    return [_standard(each) for each in option] if isinstance(option, list | str) else option


def _standard(value: Any) -> Any:
    """A text standardized for comparison; other values unchanged."""
    return _UNREAD.sub("", value).lower().replace("'", '"') if isinstance(value, str) else value
