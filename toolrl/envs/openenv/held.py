"""Sessions that HTTP requests open and use by id, as OpenEnv's `MCPToolClient` does (mcp.py)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from toolrl.envs.openenv.mcp import INVALID_PARAMS, RpcError, RpcRequest, rpc_response, tool_result
from toolrl.envs.openenv.session import Session
from toolrl.envs.openenv.wire import ProtocolError

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Held:
    """A session with an id. closing: ends it and frees its slot; unwanted: it ends when its WebSocket leaves"""

    session: Session
    closing: AsyncExitStack
    used: float  # time of the loop
    attached: bool = False
    unwanted: bool = False


class HeldSessions:
    """The sessions that have an id."""

    def __init__(self, open_session: Callable[[], AbstractAsyncContextManager[Session]], idle_s: float) -> None:
        """idle_s: time without a request after which a session ends"""
        self._open, self._idle_s = open_session, idle_s
        self._held: dict[str, Held] = {}

    @asynccontextmanager
    async def attached(self, id: str) -> AsyncIterator[Session]:
        """The session, for one WebSocket at a time. Raises ProtocolError if there is none, or another has it."""
        held = self._held.get(id)
        if held is None or held.attached:
            raise ProtocolError(f"session {id} {'has a WebSocket already' if held else 'does not exist'}")
        held.attached = True
        try:
            yield held.session
        finally:
            held.attached, held.used = False, asyncio.get_running_loop().time()
            if held.unwanted:
                await self._end(id)

    async def end_idle(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(self._idle_s / 4)
            due = asyncio.get_running_loop().time() - self._idle_s
            for id in [id for id, held in self._held.items() if held.used < due and not held.attached]:
                _log.warning("closing an idle session")
                await self._end(id)

    async def close(self) -> None:
        """End all of them."""
        for id in list(self._held):
            await self._end(id)

    async def answer(self, body: Any) -> dict[str, Any]:
        """The response to POST /mcp."""
        return await rpc_response(body, self._result)

    async def _result(self, request: RpcRequest) -> Mapping[str, Any]:
        if request.method == "openenv/session/create":
            return {"session_id": await self._create()}
        id = request.params.get("session_id")
        held = self._held.get(id) if isinstance(id, str) else None
        if id is None or held is None:
            problem = (
                f"session {id!r} does not exist" if id else "expected a session_id; openenv/session/create has one"
            )
            raise RpcError(INVALID_PARAMS, problem)
        if request.method == "openenv/session/close":
            held.unwanted = held.attached
            if not held.attached:
                await self._end(id)
            return {"session_id": id, "closed": not held.attached, "closing": held.attached}
        async with held.session.lock:
            held.used = asyncio.get_running_loop().time()
            return await tool_result(held.session.step, request)

    async def _create(self) -> str:
        closing, id = AsyncExitStack(), uuid4().hex
        session = await closing.enter_async_context(self._open())
        self._held[id] = Held(session, closing, asyncio.get_running_loop().time())
        return id

    async def _end(self, id: str) -> None:
        if (held := self._held.pop(id, None)) is not None:
            await held.closing.aclose()
