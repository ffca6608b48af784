"""Python functions as tools of a simulator, fast and over the episode's own state, with checked calls."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any, Self

from verl.envs.base import StepResult
from verl.envs.tools.arguments import ArgumentChecker
from verl.envs.tools.base import ToolError
from verl.envs.tools.signature import read_signature
from verl.registry import nearest
from verl.text import as_text, utf8
from verl.types import Message, ToolCall, ToolSpec, ToolStatus, ToolUse


class Toolbox:
    """The functions that may be called, each with a compiled check of its arguments."""

    def __init__(self, specs: Iterable[ToolSpec]) -> None:
        self.specs = {spec.name: spec for spec in specs}
        self._checker = ArgumentChecker()

    @classmethod
    def of(cls, methods: type) -> Self:
        public = (found for name, found in vars(methods).items() if not name.startswith("_"))
        return cls(read_signature(found)[0] for found in public if inspect.isfunction(found))

    def check(self, call: ToolCall) -> None:
        """Raises ToolError, with a message for the policy, for an unknown function or invalid arguments."""
        spec = self.specs.get(call.name)
        if spec is None:
            raise ToolError(f"there is no function {call.name!r}; {nearest(call.name, list(self.specs))}")
        if problem := self._checker.problem(spec, call.arguments):
            raise ToolError(problem)

    def call(self, target: object, call: ToolCall) -> Any:
        """`target.name(**arguments)` after `check`. The functions raise ToolError for the policy's errors."""
        self.check(call)
        return getattr(target, call.name)(**call.arguments)


def answer_calls(calls: Sequence[ToolCall], run: Callable[[ToolCall], Any]) -> StepResult:
    """Run the calls in order: a message and a record for each. A ToolError becomes an answer."""
    messages, uses = [], []
    for call in calls:
        start = perf_counter()
        try:
            text, status = as_text(run(call)), ToolStatus.SUCCESS  # text unchanged, anything else as JSON
        except ToolError as error:
            text, status = f"Error: {error}", ToolStatus.USER_ERROR
        messages.append(Message("tool", utf8(text), tool=call.name))
        uses.append(ToolUse(call.name, status, perf_counter() - start))
    return StepResult(tuple(messages), tool_uses=tuple(uses))
