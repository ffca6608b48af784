"""Typed Python functions as tools: the schema comes from the type hints, the descriptions from the docstring."""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from inspect import iscoroutinefunction
from typing import Any, overload

from pydantic import ValidationError

from verl.envs.tools.base import ToolError
from verl.envs.tools.signature import read_signature
from verl.errors import ServiceDownError
from verl.host.daemon import Daemon
from verl.text import as_text

log = logging.getLogger(__name__)

MAX_ABANDONED = 32  # hanging threads of one tool, after which its calls fail


class FunctionTool:
    """A function as a tool; synchronous ones run in a new thread per call. Raises like `read_signature`."""

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        self.function = function
        self.spec, self._arguments = read_signature(function, name)
        self._abandoned: set[threading.Thread] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    @property
    def num_abandoned(self) -> int:
        """Threads still running after their call was canceled: Python cannot kill a thread."""
        self._abandoned = {thread for thread in self._abandoned if thread.is_alive()}
        return len(self._abandoned)

    async def call(self, arguments: Mapping[str, Any], bound: Callable[..., Any] | None = None) -> str:
        """bound: the method of an object to run, if the function is a method"""
        try:
            checked = self._arguments.model_validate(dict(arguments))  # coerces, e.g. 2.0 to a declared int
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            raise ToolError(f"Wrong arguments: {'; '.join(problems)}") from error
        given = {str(field.alias): getattr(checked, key) for key, field in self._arguments.model_fields.items()}
        run = self.function if bound is None else bound
        return as_text(await (run(**given) if iscoroutinefunction(run) else self._in_thread(partial(run, **given))))

    async def close(self) -> None:
        """No-op: no resources."""

    async def _in_thread(self, run: Callable[[], Any]) -> Any:
        """Runs the function in a daemon thread: if it hangs, it blocks neither a thread pool nor the exit."""
        if self.num_abandoned >= MAX_ABANDONED:
            raise ServiceDownError(f"tool {self.spec.name!r}", f"{MAX_ABANDONED} of its calls hang")
        call = Daemon(f"tool {self.spec.name}", run)
        try:
            return await call.result()
        except asyncio.CancelledError:
            if not self._abandoned:
                log.warning("tool %r: a call was canceled; its thread keeps running until it returns", self.spec.name)
            self._abandoned.add(call.thread)
            raise


@overload
def tool(function: Callable[..., Any]) -> FunctionTool: ...
@overload
def tool(*, name: str) -> Callable[[Callable[..., Any]], FunctionTool]: ...
def tool(
    function: Callable[..., Any] | None = None, *, name: str | None = None
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """Decorator: a typed function as a tool, `@tool` or `@tool(name="search")`. Raises like `read_signature`."""
    if function is not None:
        return FunctionTool(function)
    return lambda decorated: FunctionTool(decorated, name)
