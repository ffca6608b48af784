"""Tools of MCP servers (Model Context Protocol), over stdio or streamable HTTP, by the package `mcp`.

The client lives in an event loop of its own, in a thread. So a server is connected before any loop runs, and the cancel
scopes that the client opens in one task are closed in that same task, wherever a call or the end of the run comes from.
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

CALL_S = 24 * 3600.0  # what ends a call is its deadline in the runner, not the client
MAX_COMPLAINT_CHARS = 500


class McpTool:
    """One tool of a server."""

    def __init__(self, server: McpServer, spec: ToolSpec) -> None:
        self.spec = spec
        self._server = server

    async def call(self, arguments: Mapping[str, Any]) -> str:
        return await self._server.call(self.spec.name, arguments)

    async def close(self) -> None:
        """Ends the connection to the server, for all of its tools."""
        await self._server.close()


class McpServer:
    """A server and its tools. A connection that breaks is made anew by the next call.

    command:   a program to start and its words; or
    url:       of a server that runs, such as http://127.0.0.1:8000/mcp
    env:       variables of the program, beside the few (PATH, HOME, ..) that it gets anyhow
    only:      names of the tools that are wanted; all of them if left out
    timeout_s: for the server to answer while it is being connected; a program that loads much before may need more

    Raises ConfigError for neither or both of command and url, and for tools that are not there; ServiceDownError for a
    server that cannot be reached.
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
        self._complaints = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  closed with the server
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._connection: AbstractContextManager[Client] | None = None
        self._calls: set[anyio.CancelScope] = set()  # those under way, in the portal's loop
        self._portal = _portal()
        try:
            self.tools = [McpTool(self, spec) for spec in self._specs(only)]
        except BaseException:
            self._close()
            raise

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The text of a tool's answer. Raises ToolError for an answer that is an error, ServiceDownError for none."""
        client = await asyncio.to_thread(self._connected)
        future = self._portal.start_task_soon(self._call, client, name, dict(arguments))
        try:
            result = await asyncio.wrap_future(future)  # a call that is cancelled here is cancelled there
        except Exception as error:  # the package raises whatever its transports raise
            if isinstance(error, MCPError) and error.code == mcp_types.INVALID_PARAMS:
                raise ToolError(str(error)) from error
            await asyncio.to_thread(self._disconnect, client)
            raise ServiceDownError(self._name, _innermost(error)) from error
        text = _text(result)
        if result.is_error:
            raise ToolError(text)
        return text

    async def close(self) -> None:
        """Ends the connection and, if it was started here, the server."""
        await asyncio.to_thread(self._close)

    async def _call(self, client: Client, name: str, arguments: dict[str, Any]) -> mcp_types.CallToolResult:
        """In the portal's loop. Raises ValueError once an answer has come that nobody can read: it may be this one."""
        with anyio.CancelScope() as scope:
            self._calls.add(scope)
            try:
                return await client.call_tool(name, arguments, CALL_S)
            finally:
                self._calls.discard(scope)
        raise ValueError("it gave an answer that is not valid JSON-RPC, which may have been to this call")

    async def _on_message(self, message: object) -> None:
        """The package drops what it cannot read; where that was an answer, whoever waits for it would wait for ever."""
        if isinstance(message, ValidationError) and _is_answer(message.errors(include_url=False)[0]["input"]):
            for scope in self._calls:
                scope.cancel()

    def _specs(self, only: Sequence[str] | None) -> list[ToolSpec]:
        client = self._connected()
        try:
            tools = self._portal.start_task_soon(_list_tools, client, self._timeout_s).result()
        except TimeoutError as error:
            problem = f"does not list its tools within its option timeout_s={self._timeout_s:g}"
            raise ServiceDownError(self._name, problem) from error
        except Exception as error:  # the package raises whatever its transports and validators raise
            raise ServiceDownError(self._name, f"does not tell its tools ({_innermost(error)})") from error
        found = {one.name: ToolSpec(one.name, one.description or "", one.input_schema) for one in tools}
        missing = sorted(set(only or ()) - set(found))
        if missing:
            raise ConfigError(f"{self._name} has no tools {', '.join(missing)}; it has {', '.join(found)}")
        return [found[name] for name in (only or found)]

    def _connected(self) -> Client:
        """The client; a new one if the last has been given up. Raises ServiceDownError."""
        with self._lock:
            if self._client is None:
                transport: Any = self._url
                if self._url is None:
                    program = StdioServerParameters(command=self._command[0], args=self._command[1:], env=self._env)
                    transport = stdio_client(program, errlog=self._complaints)
                self._connection = self._portal.wrap_async_context_manager(
                    _open(transport, self._timeout_s, self._on_message)
                )
                try:
                    self._client = self._connection.__enter__()
                except TimeoutError as error:
                    problem = self._complaint(f"does not answer within its option timeout_s={self._timeout_s:g}")
                    raise ServiceDownError(self._name, problem) from error
                except Exception as error:  # the package raises groups of whatever its transports raise
                    raise ServiceDownError(
                        self._name, f"cannot be reached ({self._complaint(_innermost(error))})"
                    ) from error
            return self._client

    def _disconnect(self, client: Client | None) -> None:
        """Gives the client up, unless somebody else has done so already."""
        with self._lock:
            if self._client is not client or self._client is None or self._connection is None:
                return
            self._client = None
            try:
                self._connection.__exit__(None, None, None)
            except Exception as error:  # noqa: BLE001  a broken connection may break again while it ends
                log.debug("%s: %s", self._name, _innermost(error))

    def _close(self) -> None:
        self._disconnect(self._client)
        with self._lock:
            if not self._complaints.closed:  # each of the tools closes the server
                self._complaints.close()
                self._portal.start_task_soon(self._portal.stop, True)

    def _complaint(self, problem: str) -> str:
        """The problem and the last that the program has written to stderr."""
        size = self._complaints.seek(0, os.SEEK_END)
        self._complaints.seek(max(0, size - MAX_COMPLAINT_CHARS))
        written = self._complaints.read().strip()
        return f"{problem}; it wrote: {written}" if written else problem


def _portal() -> BlockingPortal:
    """An event loop in a daemon thread: a run that ends without closing its tools must not wait for it."""
    started: Future[BlockingPortal] = Future()

    async def live() -> None:
        async with BlockingPortal() as portal:
            started.set_result(portal)
            await portal.sleep_until_stopped()

    threading.Thread(target=anyio.run, args=(live,), name="mcp", daemon=True).start()
    return started.result()


@asynccontextmanager
async def _open(transport: Any, timeout_s: float, on_message: MessageHandlerFnT) -> AsyncIterator[Client]:
    """A client whose handshake, all of its attempts together, ends in time. Raises TimeoutError."""
    with anyio.fail_after(timeout_s) as limit:
        async with Client(transport, read_timeout_seconds=timeout_s, message_handler=on_message) as client:
            limit.deadline = math.inf
            yield client


async def _list_tools(client: Client, timeout_s: float) -> list[mcp_types.Tool]:
    """Those of all pages. Raises TimeoutError where these do not end in time."""
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
    """Whether a message, or a line that may be one, answers a request: programs write other lines, too."""
    if isinstance(received, str):
        try:
            received = json.loads(received)
        except (ValueError, RecursionError):
            return False
    return isinstance(received, dict) and "id" in received and ("result" in received or "error" in received)


def _text(result: mcp_types.CallToolResult) -> str:
    """Texts as they are; of images and other contents, that they are there."""
    parts = [one.text if isinstance(one, mcp_types.TextContent) else f"[{one.type}]" for one in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {str(error)[:MAX_COMPLAINT_CHARS]}"
