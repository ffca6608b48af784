"""BFCL's own checker, gold responses for its keys, and good responses spoiled in many ways."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from toolrl.benchmarks.bfcl.reward import read_key
from toolrl.check.lab.__main__ import as_trajectory
from verl.types import Task, ToolCall, Trajectory

Verdict = Callable[[list[Any], Sequence[ToolCall], list[Any]], bool]


class _AnyModel(dict[str, Any]):
    """Every model keeps the dots of names."""

    def __missing__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(underscore_to_dot=False)


@cache
def ast_checker(category: str) -> Verdict:
    """The package's checker as (functions, calls, ground truth) -> right; what it raises for is wrong.

    It imports the package's table of models, and with it the SDK of every vendor, to read one flag: that table is
    replaced while it is imported.
    """
    models = ModuleType("bfcl_eval.constants.model_config")
    models.MODEL_CONFIG_MAPPING = _AnyModel()  # type: ignore[attr-defined]
    with patch.dict(sys.modules, {models.__name__: models}):
        from bfcl_eval.constants.enums import Language
        from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker as check

    def verdict(functions: list[Any], calls: Sequence[ToolCall], truth: list[Any]) -> bool:
        made = [{call.name: call.arguments} for call in calls]
        try:
            return bool(check(functions, made, truth, Language.PYTHON, category, "any")["valid"])
        except (TypeError, AttributeError, KeyError, ValueError, OverflowError):
            return False

    return verdict


def with_calls(task: Task, calls: Sequence[ToolCall]) -> Trajectory:
    """A finished episode whose one message makes these calls."""
    episode = as_trajectory(task, "")
    message = replace(episode.turns[0].message, tool_calls=tuple(calls))
    return replace(episode, turns=(replace(episode.turns[0], message=message),))


def gold_calls(task: Task) -> list[ToolCall]:
    """The calls of the key, each parameter with its first value; without one, and unknown to the function, left out."""
    schemas = {tool["name"]: tool["parameters"]["properties"] for tool in task.extra["tools"]}
    return [ToolCall(name, _picked(accepted, schemas[name])) for name, accepted in read_key(task)]


def _picked(accepted: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _pick(next(value for value in values if value != ""), schemas[name])
        for name, values in accepted.items()
        if name in schemas and any(value != "" for value in values)
    }


def _pick(value: Any, schema: dict[str, Any]) -> Any:
    """Keys of an object are keyed once more: each has a list of values."""
    if isinstance(value, dict) and schema.get("type") == "object":
        return {key: next(each for each in options if each != "") for key, options in value.items() if options != [""]}
    if isinstance(value, list) and "items" in schema:
        return [_pick(each, schema["items"]) for each in value]
    return value


def spoiled(calls: Sequence[ToolCall], task: Task, chance: random.Random) -> list[ToolCall]:
    """The calls with something changed in one of them, or in their number."""
    made = [ToolCall(call.name, copy.deepcopy(dict(call.arguments))) for call in calls]
    number = chance.randrange(len(made))
    name, arguments = made[number].name, dict(made[number].arguments)
    kind = chance.randrange(12)
    if kind == 0:
        return chance.choice([made[:number] + made[number + 1 :], [*made, made[number]], made[::-1], []])
    if kind == 1:
        names = [name.replace(".", "_"), name.upper(), f"{name}_x", chance.choice(task.extra["tools"])["name"]]
        name = chance.choice(names)
    elif kind == 2 and arguments:
        del arguments[chance.choice(list(arguments))]
    elif kind == 3:
        properties = next(tool for tool in task.extra["tools"] if tool["name"] == name)["parameters"]["properties"]
        added = chance.choice([*properties, "invented"])
        arguments[added] = chance.choice([properties.get(added, {}).get("default"), 1, 0.5, "x", "", True, [], {}])
    elif kind == 4:
        other = chance.choice(made)
        arguments, made[made.index(other)] = dict(other.arguments), ToolCall(other.name, arguments)
    elif arguments:
        key = chance.choice(list(arguments))
        arguments[key] = _another(arguments[key], chance)
    made[number] = ToolCall(name, arguments)
    return made


def _another(value: Any, chance: random.Random) -> Any:
    if value and isinstance(value, list | dict) and chance.random() < 0.6:  # inside of it
        place = chance.choice(range(len(value)) if isinstance(value, list) else list(value))
        value[place] = _another(value[place], chance)
        return value
    return chance.choice([*_LIKE.get(type(value), lambda value: [])(value), *_ODD, str(value), [value], {"a": value}])


_ODD: list[Any] = [None, "", [], {}, 0, 1.0, True]
_LIKE: dict[type, Callable[[Any], list[Any]]] = {
    str: lambda text: [
        *(text.upper(), text.title(), f" {text}. ", text.replace(" ", "-"), text.replace(",", ""), f"*{text}*"),
        *(text.replace("'", '"'), f"{text}x", text[:-1], f"{text};", text.replace("_", "^"), text.split()),
    ],
    bool: lambda flag: [not flag, int(flag), float(flag)],
    int: lambda number: [number + 1, float(number), -number, number + 0.5, bool(number)],
    float: lambda number: [int(number), number + 1, number * (1 + 1e-15), round(number)],
    list: lambda items: [items[::-1], items[:-1], [*items, *items[:1]], [items], {"items": items}],
    dict: lambda table: [
        *(dict(list(table.items())[1:]), {**table, "invented": 1}, [table], list(table.values())),
        {key.upper(): value for key, value in table.items()},
    ],
}
