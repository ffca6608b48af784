"""Tools of MCP servers (Model Context Protocol), over stdio or streamable HTTP, by the package `mcp`.

The client has its own event loop in a thread: it connects before any other loop runs, and its cancel scopes are closed
in the task that opened them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import shlex
import tempfile
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any

import anyio
import mcp_types
from anyio.from_thread import BlockingPortal
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client.session import MessageHandlerFnT
from pydantic import ValidationError

from verl.envs.tools.base import ToolError
from verl.errors import ConfigError, ServiceDownError
from verl.types import ToolSpec

log = logging.getLogger(__name__)

CALL_S = 24 * 3600.0  # effectively none: the runner enforces the deadline of a call
MAX_STDERR_CHARS = 500


class McpTool:
    def __init__(self, server: McpServer, spec: ToolSpec) -> None:
        self.spec = spec
        self._server = server

    async def call(self, arguments: Mapping[str, Any]) -> str:
        return await self._server.call(self.spec.name, arguments)

    async def close(self) -> None:
        """Closes the connection to the server, for all of its tools."""
        await self._server.close()


class McpServer:
    """A server and its tools. After a connection error the next call reconnects.

    command:   a program to start, with its arguments; or
    url:       of a running server, such as http://127.0.0.1:8000/mcp
    env:       environment variables of the program, in addition to the default ones (PATH, HOME, ..)
    only:      names of the tools to offer; default: all
    timeout_s: limit for connecting; a program with a slow startup may need more

    Raises ConfigError for wrong options and unknown tools, ServiceDownError for an unreachable server.
    """

    def __init__(
        self,
        command: str | Sequence[str] | None = None,
        url: str | None = None,
        env: Mapping[str, str] | None = None,
        only: Sequence[str] | None = None,
        timeout_s: float = 8.0,
    ) -> None:
        if (command is None) == (url is None):
            raise ConfigError("tool 'mcp' needs either a command, such as 'python server.py', or a url")
        self._command = shlex.split(command) if isinstance(command, str) else list(command or ())
        self._url = url
        self._env = dict(env) if env else None
        self._timeout_s = timeout_s
        self._name = f"MCP server {url or ' '.join(self._command)}"
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  closed with the server
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._connection: AbstractContextManager[Client] | None = None
        self._calls: set[anyio.CancelScope] = set()  # in flight, in the portal's loop
        self._portal = _portal()
        try:
            self.tools = [McpTool(self, spec) for spec in self._specs(only)]
        except BaseException:
            self._close()
            raise

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Raises ToolError for an error result, ServiceDownError for no answer."""
        client = await asyncio.to_thread(self._connect)
        future = self._portal.start_task_soon(self._call, client, name, dict(arguments))
        try:
            result = await asyncio.wrap_future(future)  # propagates cancellation
        except Exception as error:  # the package passes on any exception of its transports
            if isinstance(error, MCPError) and error.code == mcp_types.INVALID_PARAMS:
                raise ToolError(str(error)) from error
            await asyncio.to_thread(self._disconnect, client)
            raise ServiceDownError(self._name, _innermost(error)) from error
        text = _text(result)
        if result.is_error:
            raise ToolError(text)
        return text

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    async def _call(self, client: Client, name: str, arguments: dict[str, Any]) -> mcp_types.CallToolResult:
        """In the portal's loop. Raises ValueError after an unparsable answer, possibly to this call."""
        with anyio.CancelScope() as scope:
            self._calls.add(scope)
            try:
                return await client.call_tool(name, arguments, CALL_S)
            finally:
                self._calls.discard(scope)
        raise ValueError("received an answer that is not valid JSON-RPC, possibly to this call")

    async def _on_message(self, message: object) -> None:
        """The package drops unparsable messages: a caller could wait forever."""
        if isinstance(message, ValidationError) and _is_answer(message.errors(include_url=False)[0]["input"]):
            for scope in self._calls:
                scope.cancel()

    def _specs(self, only: Sequence[str] | None) -> list[ToolSpec]:
        client = self._connect()
        try:
            tools = self._portal.start_task_soon(_list_tools, client, self._timeout_s).result()
        except TimeoutError as error:
            problem = f"does not list its tools within its option timeout_s={self._timeout_s:g}"
            raise ServiceDownError(self._name, problem) from error
        except Exception as error:  # the package passes on any exception of its transports and validators
            raise ServiceDownError(self._name, f"does not list its tools ({_innermost(error)})") from error
        specs = {one.name: ToolSpec(one.name, one.description or "", one.input_schema) for one in tools}
        missing = sorted(set(only or ()) - set(specs))
        if missing:
            raise ConfigError(f"{self._name} has no tools {', '.join(missing)}; it has {', '.join(specs)}")
        return [specs[name] for name in (only or specs)]

    def _connect(self) -> Client:
        """The client; reconnects after a disconnect. Raises ServiceDownError."""
        with self._lock:
            if self._client is None:
                transport: Any = self._url
                if self._url is None:
                    program = StdioServerParameters(command=self._command[0], args=self._command[1:], env=self._env)
                    transport = stdio_client(program, errlog=self._stderr)
                opened = _open(transport, self._timeout_s, self._on_message)
                self._connection = self._portal.wrap_async_context_manager(opened)
                try:
                    self._client = self._connection.__enter__()
                except TimeoutError as error:
                    problem = self._with_stderr(f"does not answer within its option timeout_s={self._timeout_s:g}")
                    raise ServiceDownError(self._name, problem) from error
                except Exception as error:  # the package raises groups of any exceptions of its transports
                    problem = self._with_stderr(_innermost(error))
                    raise ServiceDownError(self._name, f"cannot be reached ({problem})") from error
            return self._client

    def _disconnect(self, client: Client | None) -> None:
        with self._lock:
            if self._client is not client or self._client is None or self._connection is None:
                return
            self._client = None
            try:
                self._connection.__exit__(None, None, None)
            except Exception as error:  # noqa: BLE001  a broken connection may fail again while closing
                log.debug("%s: %s", self._name, _innermost(error))

    def _close(self) -> None:
        self._disconnect(self._client)
        with self._lock:
            if not self._stderr.closed:  # called once per tool
                self._stderr.close()
                self._portal.start_task_soon(self._portal.stop, True)

    def _with_stderr(self, problem: str) -> str:
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - MAX_STDERR_CHARS))
        written = self._stderr.read().strip()
        return f"{problem}; stderr: {written}" if written else problem


def _portal() -> BlockingPortal:
    """In a daemon thread: it must not block the exit of a run that does not close its tools."""
    started: Future[BlockingPortal] = Future()

    async def live() -> None:
        async with BlockingPortal() as portal:
            started.set_result(portal)
            await portal.sleep_until_stopped()

    threading.Thread(target=anyio.run, args=(live,), name="mcp", daemon=True).start()
    return started.result()


@asynccontextmanager
async def _open(transport: Any, timeout_s: float, on_message: MessageHandlerFnT) -> AsyncIterator[Client]:
    """A client; the handshake, all attempts together, is limited. Raises TimeoutError."""
    with anyio.fail_after(timeout_s) as limit:
        async with Client(transport, read_timeout_seconds=timeout_s, message_handler=on_message) as client:
            limit.deadline = math.inf
            yield client


async def _list_tools(client: Client, timeout_s: float) -> list[mcp_types.Tool]:
    """The tools of all pages. Raises TimeoutError."""
    tools: list[mcp_types.Tool] = []
    cursor = None
    with anyio.fail_after(timeout_s):
        while True:
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if not cursor:
                return tools


def _is_answer(received: object) -> bool:
    """Whether a message or line is an answer: programs also print other lines."""
    if isinstance(received, str):
        try:
            received = json.loads(received)
        except (ValueError, RecursionError):
            return False
    return isinstance(received, dict) and "id" in received and ("result" in received or "error" in received)


def _text(result: mcp_types.CallToolResult) -> str:
    """Text contents joined; images and other contents as placeholders."""
    parts = [one.text if isinstance(one, mcp_types.TextContent) else f"[{one.type}]" for one in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {str(error)[:MAX_STDERR_CHARS]}"
