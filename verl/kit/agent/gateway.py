"""The HTTP server between agents and the policy, in the event loop of the episodes.

Every session has its own path and key. The server listens on the loopback interface by default.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from verl.errors import ServiceDownError
from verl.kit.agent import chat_api
from verl.kit.agent.chat_api import MODEL, chat_error
from verl.kit.agent.requests import ApiError, ChatRequest, ChatResponse
from verl.kit.agent.rewards import read_reward
from verl.kit.agent.session import Exchange, Session
from verl.kit.serving.serving import BoundedProtocol, Gate, ServingConfig

_log = logging.getLogger(__name__)
_RETRY_HEADER = "x-stainless-retry-count"  # of the SDKs of OpenAI and Anthropic
_GRACE_S = 2
_PING_S = 15.0  # between comments in a stream whose response is not there yet

Events = Iterator[Mapping[str, Any]]


class _Server(uvicorn.Server):
    """The signals stay those of the run."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Delivered(Response):
    """A response that is marked when it has been sent."""

    def __init__(self, response: Response, exchange: Exchange) -> None:
        super().__init__()
        self._response, self._exchange = response, exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._response(scope, receive, send)
        self._exchange.delivered = True


class Gateway:
    """The sessions of all agents that run now."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0, max_body_mib: int = 32) -> None:
        """port: 0 chooses a free one"""
        self._host, self._port, self._max_body_mib = host, port, max_body_mib
        self._sessions: dict[str, Session] = {}
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises ServiceDownError if it cannot listen."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            listening = socket.create_server((self._host, self._port), family=family, backlog=1024)
        except OSError as error:
            raise ServiceDownError(
                "the gateway", f"cannot listen on {self._host} port {self._port}: {error}"
            ) from error
        self._port = listening.getsockname()[1]
        config = ServingConfig(self._host, self._port, max_body_mib=self._max_body_mib, max_requests=1 << 16)
        gate = Gate(self._app(), config, token=None)  # each session has its own
        settings = uvicorn.Config(
            gate,
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            log_level="warning",
            timeout_graceful_shutdown=_GRACE_S,
        )
        self._server = _Server(settings)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))

    async def close(self) -> None:
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait([self._serving])
        self._server = self._serving = None

    def url(self, session: Session) -> str:
        """Of the session; OpenAI's API is below /v1."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}/sessions/{session.id}"

    @contextmanager
    def serving(self, session: Session) -> Iterator[None]:
        """Accept the session's requests in the block."""
        self._sessions[session.id] = session
        try:
            yield
        finally:
            del self._sessions[session.id]

    def _app(self) -> Starlette:
        def route(path: str, answer: Callable[..., Any], method: str = "POST") -> Route:
            return Route(f"/sessions/{{session}}{path}", self._authorized(answer), methods=[method])

        return Starlette(
            routes=[
                route("/v1/chat/completions", self._chat),
                route("/v1/models", _models, "GET"),
                route("/reward", _reward),
            ]
        )

    def _authorized(self, answer: Callable[..., Any]) -> Callable[..., Any]:
        """The endpoint with the session of its path, whose key the request must have; errors as SDKs expect."""

        async def endpoint(request: Request) -> Response:
            try:
                response: Response = await answer(self._session(request), request)
            except ApiError as error:
                return JSONResponse(chat_error(error), error.status)
            return response

        return endpoint

    def _session(self, request: Request) -> Session:
        session = self._sessions.get(request.path_params["session"])
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        key = token if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        if session is None or not hmac.compare_digest(key.encode(), session.key.encode()):
            raise ApiError(401, "invalid_api_key", "the session is over, or this is not its key")
        return session

    async def _chat(self, session: Session, request: Request) -> Response:
        raw, body = await _json(request)
        asked = chat_api.read_chat(body)
        exchange = _exchange(session, request, asked, raw)
        if body.get("stream"):
            chunks = lambda response: chat_api.chat_chunks(response, body)  # noqa: E731
            return _stream(session, exchange, chunks)
        response = await session.response(exchange)
        return _Delivered(JSONResponse(chat_api.chat_completion(response, body)), exchange)


def _exchange(session: Session, request: Request, asked: ChatRequest, raw: bytes) -> Exchange:
    retried = request.headers.get(_RETRY_HEADER, "0") != "0"
    return session.exchange(asked, request.url.path.encode() + b"\n" + raw, retried)


async def _json(request: Request) -> tuple[bytes, dict[str, Any]]:
    raw = await request.body()
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "invalid_json", f"the body is not JSON ({error})") from error
    if not isinstance(body, dict):
        raise ApiError(400, "invalid_json", "the body is not a JSON object")
    return raw, body


def _stream(session: Session, exchange: Exchange, chunks: Callable[[ChatResponse], Events]) -> StreamingResponse:
    """Server-sent events. An error after the start of the stream is an event, too."""

    async def events() -> AsyncIterator[str]:
        waiting = asyncio.ensure_future(session.response(exchange))
        try:
            while not (await asyncio.wait([waiting], timeout=_PING_S))[0]:
                yield ": waiting for the policy\n\n"
            for chunk in chunks(waiting.result()):
                yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
            exchange.delivered = True  # many clients do not wait for the end of the stream
            yield "data: [DONE]\n\n"
        except ApiError as error:
            yield f"data: {json.dumps(chat_error(error))}\n\n"
        finally:
            waiting.cancel()

    return StreamingResponse(events(), media_type="text/event-stream", headers={"cache-control": "no-cache"})


async def _models(_: Session, __: Request) -> Response:
    return JSONResponse(
        {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "toolrl"}]}
    )


async def _reward(session: Session, request: Request) -> Response:
    _, body = await _json(request)
    try:
        session.score = read_reward(body)
    except ValueError as error:
        raise ApiError(400, "invalid_reward", str(error)) from error
    return JSONResponse({"reward": session.score.total})
