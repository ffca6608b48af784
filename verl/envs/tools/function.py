"""Typed Python functions as tools: the schema comes from the type hints, the words from the docstring."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from inspect import iscoroutinefunction
from typing import Any, overload

from pydantic import ValidationError

from verl.daemon import Daemon
from verl.envs.tools.base import ToolError
from verl.envs.tools.signature import read_signature
from verl.errors import ServiceDownError
from verl.types import ToolSpec

log = logging.getLogger(__name__)

MAX_ABANDONED = 32  # threads of one tool that hang, before it is taken out of service


class FunctionTool:
    """A function that a policy can call. Sync ones run in a thread of their own, for every call.

    Raises ConfigError for a function that `read_signature` cannot tell of.
    """

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        self.function = function
        self._spec, self._arguments = read_signature(function, name)
        self._abandoned: set[threading.Thread] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function itself, as if it had not been made a tool."""
        return self.function(*args, **kwargs)

    @property
    def spec(self) -> ToolSpec:
        return self._spec

    @property
    def num_abandoned(self) -> int:
        """Threads that still run after their call was stopped: Python cannot end a thread."""
        self._abandoned = {thread for thread in self._abandoned if thread.is_alive()}
        return len(self._abandoned)

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """The function's answer, as it is if it is a text, else as JSON."""
        try:
            checked = self._arguments.model_validate(dict(arguments))  # 2.0 becomes the 2 that was declared, and so on
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            raise ToolError(f"Wrong arguments: {'; '.join(problems)}") from error
        given = {str(field.alias): getattr(checked, key) for key, field in self._arguments.model_fields.items()}
        if iscoroutinefunction(self.function):
            answer = await self.function(**given)
        else:
            answer = await self._in_thread(given)
        return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)

    async def close(self) -> None:
        """Nothing to end."""

    async def _in_thread(self, given: Mapping[str, Any]) -> Any:
        """Runs the function in a daemon thread: one that hangs keeps neither a pool's place nor the process's end."""
        if self.num_abandoned >= MAX_ABANDONED:
            raise ServiceDownError(f"tool {self.spec.name!r}", f"{MAX_ABANDONED} of its calls hang")
        call = Daemon(f"tool {self.spec.name}", partial(self.function, **given))
        try:
            return await call.result()
        except asyncio.CancelledError:
            self._abandon(call.thread)
            raise

    def _abandon(self, thread: threading.Thread) -> None:
        if not self._abandoned:
            log.warning("tool %r: a call was stopped, but its thread goes on until it ends by itself", self.spec.name)
        self._abandoned.add(thread)


@overload
def tool(function: Callable[..., Any]) -> FunctionTool: ...
@overload
def tool(*, name: str) -> Callable[[Callable[..., Any]], FunctionTool]: ...
def tool(
    function: Callable[..., Any] | None = None, *, name: str | None = None
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """Decorator that makes a typed function a tool: `@tool`, or `@tool(name="search")`.

    Raises ConfigError if the function cannot be one.
    """
    if function is not None:
        return FunctionTool(function)
    return lambda decorated: FunctionTool(decorated, name)
