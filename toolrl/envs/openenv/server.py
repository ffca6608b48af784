"""Serves any environment of ours, for the clients of openenv and for `env.name=remote` (wire.py).

    toolrl env-server --env shop [--option key=value ..] [--host 127.0.0.1] [--port 8100] [--idle-s 1800]
        [--data tasks.jsonl] [--task-option key=value ..]

A session plays one episode at a time. For openenv's clients `reset` selects a task, an observation has the messages for
the policy and the tools, and an action is the policy's message or a call. The reward of a step is its turn reward, if
any; the last step, with `done`, adds the environment's verdict. A message without calls is an answer: most environments
end with it. Any client that can reach the port can play: beyond localhost a token is required.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any

from fastapi import Body, FastAPI, WebSocket, WebSocketDisconnect

from toolrl.envs.openenv.held import HeldSessions
from toolrl.envs.openenv.session import Session, TaskDraw, answer, check_task, error_response
from toolrl.envs.openenv.wire import Action, ErrorCode, ProtocolError
from toolrl.servers.bounds import LargeWork
from toolrl.servers.serving import add_serving_arguments, new_app, serve, serving_config
from verl.data.row_names import RowNames
from verl.data.tasks import TaskSet
from verl.envs.base import EnvFactory
from verl.envs.registry import build_env_factory, build_tasks
from verl.errors import VerlError
from verl.host.arguments import Arguments, positive_float, positive_int
from verl.registry import option
from verl.types import Task

MAX_SESSIONS = 4000  # connections, of which a server holds up to half of its descriptors
_INBOX = 8  # messages of a session that wait for their turn
_log = logging.getLogger(__name__)


class Sessions:
    """The open sessions of a server."""

    def __init__(self, factory: EnvFactory, tasks: TaskDraw, idle_s: float, max_sessions: int) -> None:
        self._factory, self._tasks, self._idle_s, self._max_sessions = factory, tasks, idle_s, max_sessions
        self._num_open = 0
        self._large = LargeWork()
        self.held = HeldSessions(self.open, idle_s)

    def __len__(self) -> int:
        return self._num_open

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Session]:
        """Raises ProtocolError if too many are open."""
        if self._num_open >= self._max_sessions:
            problem = f"{self._num_open} sessions are open; --max-episodes={self._max_sessions}"
            raise ProtocolError(problem, ErrorCode.CAPACITY_REACHED)
        self._num_open += 1
        session = Session(self._factory, self._tasks)
        try:
            yield session
        finally:
            await session.close()
            self._num_open -= 1

    async def serve(self, websocket: WebSocket) -> None:
        """Answers a client until it leaves, which cancels its running step, or is idle for `idle_s`."""
        await websocket.accept()
        id = websocket.query_params.get("session_id")
        try:
            async with self.open() if id is None else self.held.attached(id) as session:
                await self._converse(websocket, session)
        except ProtocolError as error:
            await _send(websocket, error_response(str(error), error.code))
        with suppress(RuntimeError, WebSocketDisconnect):  # it may have left
            await websocket.close()

    async def _converse(self, websocket: WebSocket, session: Session) -> None:
        inbox: asyncio.Queue[str] = asyncio.Queue(_INBOX)
        works = _receive(websocket, inbox), self._answer_all(websocket, session, inbox)
        halves = [asyncio.create_task(each) for each in works]
        try:
            await asyncio.wait(halves, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in halves:
                each.cancel()
            await asyncio.gather(*halves, return_exceptions=True)

    async def _answer_all(self, websocket: WebSocket, session: Session, inbox: asyncio.Queue[str]) -> None:
        with suppress(TimeoutError):
            while True:
                async with asyncio.timeout(self._idle_s):
                    text = await inbox.get()
                response = await answer(session, text, self._large)
                if response is None:
                    return
                await _send(websocket, response)
        _log.warning("closing an idle session")
        with suppress(RuntimeError, WebSocketDisconnect):  # it may have left
            await websocket.close(reason=f"idle for more than {self._idle_s:g} s")


async def _receive(websocket: WebSocket, inbox: asyncio.Queue[str]) -> None:
    with suppress(WebSocketDisconnect):
        while True:
            await inbox.put(await websocket.receive_text())


async def _send(websocket: WebSocket, response: dict[str, Any]) -> None:
    with suppress(WebSocketDisconnect):
        await websocket.send_text(json.dumps(response, ensure_ascii=True))


def read_tasks(source: str, names: RowNames, factory: EnvFactory) -> Sequence[Task]:
    """The tasks of a data file. Raises DataError for one that the environment cannot run. names: that rows may use"""
    tasks = TaskSet(source, names=names)
    for task in tasks:
        check_task(task, factory)
    return tasks


def build_app(name: str, factory: EnvFactory, tasks: Sequence[Task], idle_s: float, max_sessions: int) -> FastAPI:
    """POST /mcp: mcp.py"""
    draw = TaskDraw(tasks, factory)
    sessions = Sessions(factory, draw, idle_s, max_sessions)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        ending = asyncio.create_task(sessions.held.end_idle())
        yield
        ending.cancel()
        await sessions.held.close()
        await factory.close()

    app = new_app(f"OpenEnv environment {name}", lifespan)

    @app.websocket("/ws")
    async def ws(websocket: WebSocket) -> None:
        await sessions.serve(websocket)

    @app.post("/mcp")
    async def mcp(body: Annotated[dict[str, Any], Body()]) -> dict[str, Any]:
        return await sessions.held.answer(body)

    @app.get("/health")
    async def health() -> dict[str, str | int]:
        return {"status": "healthy", "sessions": len(sessions)}

    @app.get("/metadata")
    async def metadata() -> dict[str, str]:
        return {"name": name, "description": f"{name}, {len(tasks)} tasks"}

    @app.get("/schema")
    async def schema() -> dict[str, Any]:
        anything = {"type": "object", "additionalProperties": True}
        return {"action": Action.model_json_schema(), "observation": anything, "state": anything}

    return app


def arguments() -> Arguments:
    parser = Arguments("toolrl env-server", "Serve an environment over HTTP.")
    parser.add_argument("--env", required=True, help="a known name, package.module:Class or path/to/file.py:Class")
    parser.add_argument("--option", type=option, action="append", default=[], metavar="KEY=VALUE")
    add_serving_arguments(parser, port=8100, max_body_mib=32)
    parser.add_argument("--data", help="data file of tasks, for clients of openenv")
    parser.add_argument("--user-code", action="store_true", help="let the rows of --data name code, which is run")
    parser.add_argument("--task-option", type=option, action="append", default=[], help="of bundled tasks, likewise")
    parser.add_argument("--idle-s", type=positive_float, default=1800.0, help="close episodes idle for this long")
    parser.add_argument("--max-episodes", type=positive_int, default=MAX_SESSIONS, help="max open episodes")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until interrupted. Returns 2 if it cannot start."""
    options = arguments().read(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    tasks: Sequence[Task] = ()
    try:
        factory = build_env_factory(options.env, dict(options.option))
        if options.data:
            tasks = read_tasks(options.data, RowNames((), (options.env,), options.user_code), factory)
        elif options.task_option:
            tasks = build_tasks(options.env, dict(options.task_option))
    except VerlError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    app = build_app(options.env, factory, tasks, options.idle_s, options.max_episodes)
    return serve(app, serving_config(options), websockets=True)


if __name__ == "__main__":
    sys.exit(main())
