"""Python functions as tools of an environment: their JSON schemas, checked calls, and answers to whatever is asked.

For simulators whose functions are fast and work on the episode's own state. What a policy does wrong is an answer.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints, is_typeddict

from verl.envs.tools.arguments import ArgumentChecker
from verl.envs.tools.base import ToolError
from verl.envs.tools.text import utf8
from verl.registry import nearest
from verl.types import Message, ToolCall, ToolSpec, ToolStatus, ToolUse

_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}


class Toolbox:
    """The only functions that may be called, with a compiled check of the arguments of each."""

    def __init__(self, specs: Iterable[ToolSpec]) -> None:
        self.specs = {spec.name: spec for spec in specs}
        self._checker = ArgumentChecker()

    @classmethod
    def of(cls, methods: type) -> Toolbox:
        """Every public method of a class, in the order of its definition."""
        public = (found for name, found in vars(methods).items() if not name.startswith("_"))
        return cls(function_spec(found) for found in public if inspect.isfunction(found))

    def check(self, call: ToolCall) -> None:
        """Raises ToolError, in words for the policy, for another function or arguments that do not fit its schema."""
        spec = self.specs.get(call.name)
        if spec is None:
            raise ToolError(f"there is no function {call.name!r}; {nearest(call.name, list(self.specs))}")
        if problem := self._checker.problem(spec, call.arguments):
            raise ToolError(problem)

    def call(self, target: object, call: ToolCall) -> Any:
        """`target.name(**arguments)` after `check`. The functions raise ToolError for what is the policy's fault."""
        self.check(call)
        return getattr(target, call.name)(**call.arguments)


def function_spec(function: Callable[..., Any]) -> ToolSpec:
    """What a policy is told of a function: its docstring, and a schema from its annotations.

    Parameters are str, int, float, bool, Literal, list or TypedDict, in Annotated[.., "description"] where they need
    one. Parameters without a default are required; `self` is left out.
    """
    hints = get_type_hints(function, include_extras=True)
    parameters = [found for found in inspect.signature(function).parameters.values() if found.name != "self"]
    required = [found.name for found in parameters if found.default is found.empty]
    schema = _object({found.name: hints[found.name] for found in parameters}, required)
    return ToolSpec(function.__name__, inspect.getdoc(function) or "", schema)


def _object(fields: Mapping[str, Any], required: Iterable[str]) -> dict[str, Any]:
    properties = {name: _schema(hint) for name, hint in fields.items()}
    return {
        "type": "object",
        "properties": properties,
        "required": sorted(required, key=list(properties).index),
        "additionalProperties": False,
    }


def _schema(hint: Any) -> dict[str, Any]:
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _schema(parts[0]) | {"description": parts[1]}
    if origin is Literal:
        return {"type": "string", "enum": list(parts)}
    if origin is list:
        return {"type": "array", "items": _schema(parts[0])}
    if is_typeddict(hint):
        return _object(get_type_hints(hint, include_extras=True), hint.__required_keys__)
    return {"type": _JSON_TYPES[hint]}


def answer_calls(
    calls: Sequence[ToolCall], run: Callable[[ToolCall], Any]
) -> tuple[tuple[Message, ...], tuple[ToolUse, ...]]:
    """Run the calls in their order: a message and a record of each. A ToolError is an answer like any other."""
    messages, uses = [], []
    for call in calls:
        start = perf_counter()
        try:
            text, status = as_text(run(call)), ToolStatus.SUCCESS
        except ToolError as error:
            text, status = f"Error: {error}", ToolStatus.USER_ERROR
        messages.append(Message("tool", utf8(text), tool=call.name))
        uses.append(ToolUse(call.name, status, perf_counter() - start))
    return tuple(messages), tuple(uses)


def as_text(result: Any) -> str:
    """A function's result as the policy gets to see it: a text as it is, everything else as JSON."""
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
