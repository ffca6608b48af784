"""The HTTP server between agents and the policy, in the event loop of the episodes.

Every session has its own path and key. The server listens on the loopback interface by default.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import hmac
import json
import logging
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from toolrl.envs.agent.address import LOOPBACK, Address
from toolrl.envs.agent.api.chat import MODEL, chat_chunks, chat_completion, chat_error, openai_model, read_chat
from toolrl.envs.agent.api.messages import (
    anthropic_error,
    anthropic_events,
    anthropic_message,
    anthropic_model,
    read_anthropic,
)
from toolrl.envs.agent.api.responses import read_responses, response_events, response_object
from toolrl.envs.agent.api.tokens import read_tokens, token_events, token_response
from toolrl.envs.agent.requests import ApiError, ChatRequest, ChatResponse
from toolrl.envs.agent.rewards import read_reward
from toolrl.envs.agent.session import Exchange, Session
from toolrl.servers.bounds import CONVERSATION, LargeWork, TooMuchError, num_chars, without_surrogates
from toolrl.servers.serving import BoundedProtocol, Gate, Refusal, bounded_config
from toolrl.swe.runtime import CommandFailedError, RuntimeLostError
from verl.errors import ServiceDownError

_log = logging.getLogger(__name__)
_RETRY_HEADER = "x-stainless-retry-count"  # sent by the SDKs of OpenAI and Anthropic
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
_GRACE_S = 2
_SURROGATE = re.compile(rb"\\u[dD]")
_PING_S = 15.0  # between comments in a stream whose response is not there yet

_CODES = {413: "request_too_large", 429: "too_many_requests"}

Body = Mapping[str, Any]
Answer = Callable[[Session, Request], Awaitable[Response]]
ErrorShape = Callable[[ApiError], dict[str, Any]]


@dataclass(frozen=True)
class Api:
    """How an API writes requests, responses, streams and errors. named: events of its streams have a type"""

    read: Callable[[Body], ChatRequest]
    whole: Callable[[ChatResponse, Body], dict[str, Any]]
    events: Callable[[ChatResponse, Body], Iterator[dict[str, Any]]]
    error: ErrorShape = chat_error
    named: bool = False

    def event(self, content: Mapping[str, Any], kind: str = "") -> str:
        """The event of a stream. kind: its type, if the content has none"""
        head = f"event: {content.get('type', kind)}\n" if self.named else ""
        return f"{head}data: {json.dumps(content)}\n\n"  # in ASCII: many clients split lines at U+2028, too


APIS: Mapping[str, Api] = {  # path -> API
    "/v1/chat/completions": Api(read_chat, chat_completion, chat_chunks),
    "/v1/responses": Api(read_responses, response_object, response_events, named=True),
    "/v1/messages": Api(read_anthropic, anthropic_message, anthropic_events, anthropic_error, named=True),
    "/generate": Api(read_tokens, token_response, token_events),
}


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

    def __init__(self, address: Address = LOOPBACK, routes: Sequence[Route] = ()) -> None:
        """routes: further ones, which check their requests themselves"""
        self._address, self._routes = address, routes
        self._sessions: dict[str, Session] = {}
        self._reading, self.tokenizing = LargeWork(), LargeWork()
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises ServiceDownError if it cannot listen."""
        host, port = self._address.host, self._address.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listening = socket.create_server((host, port), family=family, backlog=1024)
        except OSError as error:
            raise ServiceDownError("the gateway", f"cannot listen on {host} port {port}: {error}") from error
        self._address = replace(self._address, port=listening.getsockname()[1])
        gate = Gate(self._app(), self._address.serving, None, _refusal)  # each session has a key of its own
        settings = bounded_config(gate, lifespan="off", timeout_graceful_shutdown=_GRACE_S)
        settings.load()
        logging.getLogger("uvicorn.error").addFilter(_not_cancelled)
        self._server = _Server(settings)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        gc.freeze()  # a pass of garbage collection over a whole trainer takes a quarter of a second

    async def listen(self, listening: socket.socket) -> asyncio.Server:
        """Serve on this socket, too, until the returned server is closed."""
        assert self._server is not None
        protocol = partial(BoundedProtocol, self._server.config, self._server.server_state, {})
        return await asyncio.get_running_loop().create_server(protocol, sock=listening)

    async def close(self) -> None:
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait([self._serving])
            gc.unfreeze()
        self._server = self._serving = None

    @property
    def base_url(self) -> str:
        """The gateway's URL for agents."""
        return self._address.base_url

    def url(self, session: Session) -> str:
        """The session's URL; OpenAI's API is below /v1."""
        return f"{self.base_url}/sessions/{session.id}"

    @contextmanager
    def serving(self, session: Session) -> Iterator[None]:
        """Accept the session's requests in the block."""
        self._sessions[session.id] = session
        try:
            yield
        finally:
            del self._sessions[session.id]

    def _app(self) -> Starlette:
        def route(path: str, answer: Answer, error: ErrorShape = chat_error, method: str = "POST") -> Route:
            return Route(f"/sessions/{{session}}{path}", self._authorize(answer, error), methods=[method])

        return Starlette(
            routes=[
                *(route(path, partial(self._respond, api), api.error) for path, api in APIS.items()),
                route("/v1/messages/count_tokens", partial(self._count, read_anthropic, {}), anthropic_error),
                route(
                    "/v1/responses/input_tokens",
                    partial(self._count, read_responses, {"object": "response.input_tokens"}),
                ),
                route("/v1/models", _models, method="GET"),
                route("/v1/models/{model:path}", _model, method="GET"),
                route("/reward", self._reward),
                route("/runtime/run", self._run_command),
                Route("/sessions/{session}{path:path}", _not_served, methods=_METHODS),
                *self._routes,
            ]
        )

    def _authorize(self, answer: Answer, shape: ErrorShape) -> Callable[[Request], Awaitable[Response]]:
        """The endpoint with the session of its path, whose key the request must have; errors as SDKs expect."""

        async def endpoint(request: Request) -> Response:
            try:
                return await answer(self._session(request), request)
            except ApiError as error:
                own = anthropic_error if _is_anthropic(request) else shape
                return JSONResponse(own(error), error.status)

        return endpoint

    def _session(self, request: Request) -> Session:
        session = self._sessions.get(request.path_params["session"])
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        key = token if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        if session is None or not hmac.compare_digest(key.encode(), session.key.encode()):
            raise ApiError(401, "invalid_api_key", "the session is over, or this is not its key")
        return session

    async def _respond(self, api: Api, session: Session, request: Request) -> Response:
        raw = await request.body()
        retried = request.headers.get(_RETRY_HEADER, "0") != "0"
        path = request.url.path.encode()

        def read() -> tuple[ChatRequest, dict[str, Any], bytes]:
            return *_read_request(api.read, raw), hashlib.sha256(path + b"\n" + raw).digest()

        asked, body, digest = await self._reading.run(len(raw), read)
        exchange = session.exchange(asked, digest, retried)
        if body.get("stream"):
            return await _stream(api, session, exchange, body)
        return _Delivered(JSONResponse(api.whole(await session.response(exchange), body)), exchange)

    async def _count(
        self, read: Callable[[Body], ChatRequest], head: Mapping[str, str], session: Session, request: Request
    ) -> Response:
        """The tokens of a request that is not made."""
        raw = await request.body()
        asked, _ = await self._reading.run(len(raw), partial(_read_request, read, raw))
        return JSONResponse({**head, "input_tokens": await session.count_tokens(asked)})

    async def _json(self, request: Request) -> dict[str, Any]:
        raw = await request.body()
        return await self._reading.run(len(raw), partial(_read_json, raw))

    async def _reward(self, session: Session, request: Request) -> Response:
        body = await self._json(request)
        try:
            session.score = read_reward(body)
        except ValueError as error:
            raise ApiError(400, "invalid_reward", str(error)) from error
        return JSONResponse({"reward": session.score.total})

    async def _run_command(self, session: Session, request: Request) -> Response:
        """A command of the program in the runtime of its task."""
        body = await self._json(request)
        command, limit_s = body.get("command"), body.get("timeout_s")
        if session.task is None:
            raise ApiError(404, "no_runtime", "no runtime: set env.options.runtime=true")
        is_number = isinstance(limit_s, int | float) and not isinstance(limit_s, bool) and limit_s > 0
        if not isinstance(command, str) or not (limit_s is None or is_number) or body.keys() - {"command", "timeout_s"}:
            raise ApiError(
                400, "invalid_command", "expected {command: a text, timeout_s: a positive number, or left out}"
            )
        try:
            result = await session.task.run(command, limit_s)
        except CommandFailedError as error:
            raise ApiError(409, "command_failed", str(error)) from error
        except RuntimeLostError as error:
            session.fail(error)
            raise ApiError(503, "service_unavailable", str(error)) from error
        return JSONResponse({"output": result.output, "exit_code": result.exit_code, "status": result.status})


def _not_cancelled(record: logging.LogRecord) -> bool:
    """When a signal ends the run, its event loop cancels the open requests: uvicorn would log a traceback of each."""
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)


def _read_json(raw: bytes) -> dict[str, Any]:
    """Raises ApiError."""
    try:
        body = CONVERSATION.read(raw)
        if _SURROGATE.search(raw):
            body = without_surrogates(body)
    except TooMuchError as error:
        raise ApiError(413, _CODES[413], str(error)) from error
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "invalid_json", f"the body is not JSON ({error})") from error
    if not isinstance(body, dict):
        raise ApiError(400, "invalid_json", "the body is not a JSON object")
    return body


def _read_request(read: Callable[[Body], ChatRequest], raw: bytes) -> tuple[ChatRequest, dict[str, Any]]:
    """(the request, its body). Raises ApiError."""
    body = _read_json(raw)
    return replace(read(body), size=num_chars(body)), body


async def _stream(api: Api, session: Session, exchange: Exchange, body: Body) -> StreamingResponse:
    """Server-sent events. A refused request is an error as without a stream; a later error is an event."""
    waiting = session.connected(exchange)
    await exchange.decided.wait()
    if exchange.work.done() and (exchange.work.cancelled() or exchange.work.exception() is not None):
        await waiting

    async def events() -> AsyncIterator[str]:
        try:
            while not (await asyncio.wait([waiting], timeout=_PING_S))[0]:
                yield ": waiting for the policy\n\n"
            *most, last = api.events(waiting.result(), body)
            for event in most:
                yield api.event(event)
            exchange.delivered = True  # many clients do not wait for the end of the stream
            yield api.event(last)
            if not api.named:
                yield "data: [DONE]\n\n"
        except ApiError as error:
            yield api.event(api.error(error), "error")
        finally:
            waiting.cancel()

    return StreamingResponse(events(), media_type="text/event-stream", headers={"cache-control": "no-cache"})


async def _models(_: Session, request: Request) -> Response:
    if _is_anthropic(request):
        return JSONResponse({"data": [anthropic_model(MODEL)], "has_more": False, "first_id": MODEL, "last_id": MODEL})
    return JSONResponse({"object": "list", "data": [openai_model(MODEL)]})


async def _model(_: Session, request: Request) -> Response:
    """Any name is the policy's, as in a request."""
    name = request.path_params["model"]
    return JSONResponse(anthropic_model(name) if _is_anthropic(request) else openai_model(name))


async def _not_served(request: Request) -> Response:
    path = request.path_params["path"]
    served = ", ".join([*APIS, "/v1/models", "/reward", "/runtime/run"])
    error = ApiError(404, "not_found", f"{request.method} {path} is not served here; these are: {served}")
    return JSONResponse((anthropic_error if _is_anthropic(request) else chat_error)(error), error.status)


def _refusal(scope: Scope, refusal: Refusal) -> dict[str, Any]:
    """The error of a request that reaches no session, in the shape of its SDK."""
    shape = anthropic_error if "anthropic-version" in Headers(scope=scope) else chat_error
    hint = "; env.options.url sets its name for agents" if refusal.status == 400 and refusal.option else ""
    return shape(ApiError(refusal.status, _CODES.get(refusal.status, "invalid_request"), refusal.problem + hint))


def _is_anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers
