"""Python as a tool, in a sandbox: a fresh process per call, or one interpreter per episode."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Mapping
from typing import Any

from verl.envs.sandbox import Execution, Limits, Sandbox, Session, Status
from verl.envs.tools.base import ToolError, ToolTimeoutError
from verl.errors import ConfigError
from verl.types import Task, ToolSpec

MAX_PARSED_CHARS = 20_000  # longer code runs unchanged: its last line is not printed

CODE: Mapping[str, Any] = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "Python code."}},
    "required": ["code"],
    "additionalProperties": False,
}


class _PythonOptions:
    """Options of both tools.

    print_last: also print the value of the last line, if that is an expression whose value is not None
    limits:     fields of verl.envs.sandbox.Limits; default: the sandbox's. `wall_s` should be below the deadline of
                calls, so that partial output is returned
    """

    summary = "Runs Python code."

    def __init__(self, sandbox: Sandbox, print_last: bool = False, limits: Mapping[str, Any] | None = None) -> None:
        answered = "what it printed and the value of its last line" if print_last else "what it printed"
        self.spec = ToolSpec("python", f"{self.summary} Answers {answered}.", CODE)
        self.sandbox, self.limits, self._print_last = sandbox, parse_limits(limits), print_last

    def code(self, arguments: Mapping[str, Any]) -> str:
        return printing_last(arguments["code"]) if self._print_last else arguments["code"]

    async def close(self) -> None:
        """No-op: the sandbox belongs to the run."""


class PythonTool(_PythonOptions):
    """Runs code in a fresh process and returns its output; for an exception, the traceback."""

    async def call(self, arguments: Mapping[str, Any]) -> str:
        return answer(await self.sandbox.run(self.code(arguments), limits=self.limits))


class PythonSessions(_PythonOptions):
    """Runs code in one interpreter per episode, which keeps variables."""

    summary = "Runs Python code; variables are kept between calls."

    async def open(self, task: Task) -> PythonSession:
        return PythonSession(self)


class PythonSession:
    """One episode's interpreter, started by its first call."""

    def __init__(self, options: PythonSessions) -> None:
        self.spec = options.spec
        self._options = options
        self._session: Session | None = None

    async def call(self, arguments: Mapping[str, Any]) -> str:
        if self._session is None:
            self._session = await self._options.sandbox.session()
        try:
            return answer(await self._session.run(self._options.code(arguments), self._options.limits))
        except asyncio.CancelledError:  # past its deadline: the next call gets a fresh interpreter, not this busy one
            await self.close()
            raise

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def parse_limits(fields: Mapping[str, Any] | None) -> Limits | None:
    """None for the sandbox's. Raises ConfigError for an invalid limit."""
    if fields is None:
        return None
    known = ", ".join(Limits.__slots__)
    if not isinstance(fields, Mapping):
        raise ConfigError(f"limits of code must be {{name: number}}, not {fields!r}; there are {known}")
    for name, value in fields.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ConfigError(f"limits of code: {name} must be a positive number, not {value!r}")
    try:
        return Limits(**fields)
    except TypeError as error:
        raise ConfigError(f"limits of code: {error}; there are {known}") from error


def answer(execution: Execution) -> str:
    """The printed output. Raises ToolError, or ToolTimeoutError after a timeout."""
    if execution.status is Status.FINISHED:
        return execution.stdout
    printed = "\n".join(filter(None, (execution.stdout.rstrip(), execution.stderr.rstrip())))
    if execution.status is Status.TIMEOUT:
        raise ToolTimeoutError(f"{printed}\nThe code was stopped after {execution.seconds:.1f} s.".lstrip())
    raise ToolError(printed or f"The code ended with exit code {execution.return_code}.")


def printing_last(code: str) -> str:
    """The code with its last expression printed; line numbers in tracebacks stay correct."""
    try:
        body = ast.parse(code).body if len(code) <= MAX_PARSED_CHARS else []
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: deep nesting
        return code
    last = body[-1] if body else None
    if not isinstance(last, ast.Expr):
        return code
    lines = code.encode().splitlines(keepends=True)  # offsets count bytes
    value = last.value
    start = sum(map(len, lines[: value.lineno - 1])) + value.col_offset
    assert value.end_lineno is not None and value.end_col_offset is not None
    end = sum(map(len, lines[: value.end_lineno - 1])) + value.end_col_offset
    parts = (code.encode()[:start], b"__last__ = (", code.encode()[start:end], b")", code.encode()[end:])
    return b"".join(parts).decode() + "\nif __last__ is not None:\n    print(__last__)\n"
