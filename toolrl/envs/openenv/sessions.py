"""Sessions on servers (wire.py): connections, which wait for a free one and go to a server that is up."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from toolrl.envs.openenv.wire import ErrorCode, ProtocolError
from toolrl.servers.endpoints import Endpoint, EndpointPool
from verl.envs.clock import paused
from verl.errors import ServiceDownError
from verl.host.services import service_headers

MAX_BYTES = 100 << 20  # per message, as in the official client
QUEUE_S = 600.0  # limit for a free session, if the server has fewer than the run uses
CLOSE_S = 10.0
Answer = Mapping[str, Any]
Start = TypeVar("Start")


class FullError(Exception):
    """All sessions of a server are in use."""


class Connection:
    """One session. Raises ServiceDownError for a lost answer, ProtocolError for a refused message."""

    def __init__(self, endpoint: Endpoint, socket: ClientConnection, timeout_s: float) -> None:
        self.endpoint = endpoint
        self._socket, self._timeout_s = socket, timeout_s
        self._num_waiting = 0  # answers, in the order of the messages; those before the last are dropped

    async def ask(self, type: str, data: Mapping[str, Any], limited: bool = True) -> Answer:
        """limited: by the limit per request"""
        self._num_waiting += 1
        async with _faults(self.endpoint, self._timeout_s if limited else None):
            with suppress(ConnectionClosed):  # the reason may wait to be read
                await self._socket.send(json.dumps({"type": type, "data": dict(data)}))
            while self._num_waiting:
                answer = json.loads(await self._socket.recv())
                self._num_waiting -= 1
        if not (isinstance(answer, dict) and isinstance(answer.get("data"), dict)):
            raise ServiceDownError(self.endpoint.name, f"not a message of OpenEnv: {str(answer)[:200]}")
        content: Answer = answer["data"]
        if answer.get("type") != "error":
            return content
        problem, code = str(content.get("message"))[:1000], str(content.get("code"))
        if code == ErrorCode.CAPACITY_REACHED:
            raise FullError(problem)
        if code == ErrorCode.VALIDATION_ERROR:
            raise ProtocolError(f"{problem} {content.get('errors', '')}".strip()[:1000])
        if (service := content.get("service")) is not None:
            raise ServiceDownError(f"{service} at {self.endpoint.url}", problem)
        raise ServiceDownError(self.endpoint.name, f"{code}: {problem}")

    async def close(self) -> None:
        """Until the server has ended the session, so that the next one finds it free. At once after a lost answer."""
        if self._num_waiting:
            self._socket.transport.abort()
        with suppress(WebSocketException, OSError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._socket.send('{"type": "close"}')
                async for _ in self._socket:  # late answers, until the server closes
                    pass
        await self._socket.close()


@asynccontextmanager
async def _faults(endpoint: Endpoint, timeout_s: float | None) -> AsyncIterator[None]:
    """Raises ServiceDownError for a connection that fails, and past the limit."""
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit, endpoint.asked(WebSocketException, OSError, ValueError):
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise ServiceDownError(endpoint.name, f"no answer within timeout_s={timeout_s:g}") from error


class SessionPool(EndpointPool):
    """Servers that share the tasks.

    max_sessions: open at a time; further episodes wait, also where the servers have fewer
    timeout_s:    limit per request, and so for the slowest step
    """

    def __init__(
        self,
        service: str,
        urls: str | Sequence[str],
        hint: str,
        max_sessions: int,
        timeout_s: float,
        health_timeout_s: float,
    ) -> None:
        super().__init__(service, urls, hint, health_timeout_s)
        self._slots = asyncio.Semaphore(max_sessions)
        self._timeout_s = timeout_s

    async def begin(self, id: str, start: Callable[[Connection], Awaitable[Start]]) -> tuple[Connection, Start]:
        """A session on the server that follows from the task's id, after `start`; `end` frees it.

        Waits while all sessions are in use. Raises ServiceDownError, and what `start` raises.
        """
        async with paused():
            await self._slots.acquire()
        try:
            return await self._begin_on_any(zlib.crc32(id.encode()), start)
        except BaseException:
            self._slots.release()
            raise

    async def end(self, connection: Connection) -> None:
        try:
            await connection.close()
        finally:
            self._slots.release()

    async def _begin_on_any(
        self, first: int, start: Callable[[Connection], Awaitable[Start]]
    ) -> tuple[Connection, Start]:
        pause_s, end = 0.1, asyncio.get_running_loop().time() + QUEUE_S
        while True:
            opened = await self.first_answer(first, partial(self._begin_on, start))
            if opened is not None:
                return opened
            if asyncio.get_running_loop().time() > end:
                raise ServiceDownError(self._service, f"all sessions were in use for {QUEUE_S:g} s")
            async with paused():
                await asyncio.sleep(pause_s)
            first, pause_s = first + 1, min(2.0, 2 * pause_s)

    async def _begin_on(
        self, start: Callable[[Connection], Awaitable[Start]], endpoint: Endpoint
    ) -> tuple[Connection, Start] | None:
        """None if all sessions are in use."""
        address, headers = endpoint.url.replace("http", "ws", 1) + "/ws", service_headers()
        async with _faults(endpoint, self._timeout_s):
            socket = await connect(
                address, additional_headers=headers, max_size=MAX_BYTES, proxy=None, ping_interval=None
            )
        connection = Connection(endpoint, socket, self._timeout_s)
        try:
            return connection, await start(connection)
        except BaseException as error:
            await connection.close()
            if isinstance(error, FullError):
                return None
            raise
