"""Python as a tool, over a sandbox: a fresh process for every call, or an interpreter of the episode's own."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Mapping
from typing import Any

from verl.envs.tools.base import ToolError, ToolTimeoutError
from verl.errors import ConfigError
from verl.sandbox.base import Execution, Limits, Sandbox, Session, Status
from verl.types import Task, ToolSpec

MAX_PARSED_CHARS = 20_000  # longer code is run as it is, without a look at its last line

CODE: Mapping[str, Any] = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "Python code."}},
    "required": ["code"],
    "additionalProperties": False,
}


class PythonTool:
    """Runs code in a process of its own and answers what it printed. An exception is answered with its traceback.

    print_last: print the value of the last line, too, if that is an expression with another value than None
    limits:     fields of verl.sandbox.base.Limits; the sandbox's own if left out. `wall_s` should be below the deadline
                of calls, so that what was printed until then is answered

    Raises ConfigError for unknown limits.
    """

    def __init__(self, sandbox: Sandbox, print_last: bool = False, limits: Mapping[str, Any] | None = None) -> None:
        self.spec = ToolSpec("python", f"Runs Python code. Answers {_answered(print_last)}.", CODE)
        self._sandbox = sandbox
        self._print_last = print_last
        self._limits = limits_of(limits)

    async def call(self, arguments: Mapping[str, Any]) -> str:
        code = printing_last(arguments["code"]) if self._print_last else arguments["code"]
        return answer(await self._sandbox.run(code, limits=self._limits))

    async def close(self) -> None:
        """Nothing to end: the sandbox is the run's."""


class PythonSessions:
    """Runs code in an interpreter of the episode's own, which keeps variables. Options as PythonTool's."""

    def __init__(self, sandbox: Sandbox, print_last: bool = False, limits: Mapping[str, Any] | None = None) -> None:
        told = f"Runs Python code; variables are kept between calls. Answers {_answered(print_last)}."
        self.spec = ToolSpec("python", told, CODE)
        self._sandbox = sandbox
        self._print_last = print_last
        self._limits = limits_of(limits)

    async def open(self, task: Task) -> PythonSession:
        return PythonSession(self.spec, self._sandbox, self._print_last, self._limits)

    async def close(self) -> None:
        """Nothing to end: the sandbox is the run's."""


class PythonSession:
    """One episode's interpreter, started by its first call."""

    def __init__(self, spec: ToolSpec, sandbox: Sandbox, print_last: bool, limits: Limits | None) -> None:
        self.spec = spec
        self._sandbox = sandbox
        self._print_last = print_last
        self._limits = limits
        self._session: Session | None = None

    async def call(self, arguments: Mapping[str, Any]) -> str:
        code = printing_last(arguments["code"]) if self._print_last else arguments["code"]
        if self._session is None:
            self._session = await self._sandbox.session()
        try:
            return answer(await self._session.run(code, self._limits))
        except asyncio.CancelledError:  # past its deadline: the next call finds a fresh one, not this one at work
            await self.close()
            raise

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def limits_of(fields: Mapping[str, Any] | None) -> Limits | None:
    """Limits with these fields, None for those of the sandbox. Raises ConfigError for what is no limit."""
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
    """What was printed. Raises ToolError with the error's words, ToolTimeoutError for code that was stopped."""
    if execution.status is Status.FINISHED:
        return execution.stdout
    printed = "\n".join(part for part in (execution.stdout.rstrip(), execution.stderr.rstrip()) if part)
    if execution.status is Status.TIMEOUT:
        raise ToolTimeoutError(f"{printed}\nThe code was stopped after {execution.seconds:.1f} s.".lstrip())
    raise ToolError(printed or f"The code ended with exit code {execution.return_code}.")


def printing_last(code: str) -> str:
    """The code with its last line printed if that is an expression; line numbers in tracebacks stay right."""
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


def _answered(print_last: bool) -> str:
    return "what it printed and the value of its last line" if print_last else "what it printed"
