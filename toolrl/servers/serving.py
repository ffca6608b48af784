"""HTTP serving with access control, size and concurrency limits, and timeouts."""

import argparse
import asyncio
import base64
import gc
import hmac
import ipaddress
import json
import resource
import secrets
import socket
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import h11
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from toolrl.servers.bounds import ANY, Bounds, LargeWork, TooMuchError
from verl.errors import ConfigError
from verl.host.arguments import positive_int
from verl.host.daemon import run_async
from verl.host.services import TOKEN_VARIABLE, checked_token, service_token
from verl.units import MIB

HEADER_S = 10.0  # timeout for receiving the headers of a request
BODY_S = 60.0  # timeout for receiving the body
WRITE_S = 60.0  # timeout for a client to read the response
KEEP_ALIVE_S = 75  # until an idle connection ends: longer than clients keep theirs, which are 4 to 60 s
SHUTDOWN_S = 10  # grace period for running requests at shutdown
MAX_HEAD = 1 << 16
SMALL_CHUNK = 16  # bytes between line ends in a body of chunks; smaller ones are refused
FREE_CHUNKS = 1000  # line ends of one read, however close
BODIES_HELD = 8  # memory limit for request bodies, in bodies of the maximum size
NUM_DESCRIPTORS = 8192


@dataclass(frozen=True)
class ServingConfig:
    """Access control and limits of a server."""

    host: str
    port: int
    token_file: Path | None = None  # created (mode 0600) if missing
    no_token: bool = False
    allow_hosts: Sequence[str] = ()  # Host headers, besides localhost, this machine's name and any IP address
    max_body_mib: int = 32
    max_requests: int = 1024  # concurrent ones; more are rejected with status 429


def add_access_arguments(parser: argparse.ArgumentParser, port: int) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, default=port)
    token = f"file with the clients' token; created if missing. Default: ${TOKEN_VARIABLE}"
    parser.add_argument("--token-file", type=Path, help=token)
    parser.add_argument("--no-token", action="store_true", help="accept requests without a token")
    hosts = "accepted Host header"
    parser.add_argument("--allow-host", dest="allow_hosts", action="append", default=[], metavar="NAME", help=hosts)


def add_serving_arguments(parser: argparse.ArgumentParser, port: int, max_body_mib: int) -> None:
    add_access_arguments(parser, port)
    parser.add_argument("--max-body-mib", type=positive_int, default=max_body_mib, help="per request")
    parser.add_argument("--max-requests", type=positive_int, default=1024, help="concurrent requests")


def serving_config(options: argparse.Namespace) -> ServingConfig:
    given = vars(options)
    return ServingConfig(**{each.name: given[each.name] for each in fields(ServingConfig) if each.name in given})


def new_app(
    title: str,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
    bounds: Bounds = ANY,
) -> FastAPI:
    """Its JSON is bounded, and read in a thread if it is large.

    Validation errors never echo the input, which may be huge or contain NaN.
    """
    app = FastAPI(title=title, lifespan=lifespan)
    app.router.route_class = _bounded_route(bounds)

    @app.exception_handler(RequestValidationError)
    async def refuse(_: Request, error: RequestValidationError) -> JSONResponse:
        problems = [{key: each[key] for key in ("type", "loc", "msg")} for each in error.errors()[:20]]
        return JSONResponse({"detail": problems}, status_code=422)

    return app


def _bounded_route(bounds: Bounds) -> type[APIRoute]:
    """A route whose requests read their JSON within bounds."""
    large = LargeWork()

    class BoundedRequest(Request):
        async def json(self) -> Any:
            body = await self.body()
            try:
                return await large.run(len(body), lambda: bounds.read(body))
            except TooMuchError as error:
                raise HTTPException(413, str(error)) from error
            except json.JSONDecodeError:  # an error of validation, which FastAPI answers
                raise
            except (ValueError, RecursionError) as error:
                raise HTTPException(400, f"the body is not JSON ({error})") from error

    class BoundedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            answer = super().get_route_handler()

            async def bounded(request: Request) -> Response:
                return await answer(BoundedRequest(request.scope, request.receive))

            return bounded

    return BoundedRoute


@dataclass(frozen=True)
class Refusal:
    """A request that is not passed on. option: of the server's command line, which could change that"""

    status: int
    problem: str
    option: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


def detail(_: Scope, refusal: Refusal) -> dict[str, Any]:
    """The body of a refusal, as FastAPI writes its own."""
    return {"detail": f"{refusal.problem}; {refusal.option}" if refusal.option else refusal.problem}


class Gate:
    """ASGI middleware: checks token, Host, body size, concurrency; cancels abandoned requests.

    The application gets a body as it came, in pieces: a copy of 500 MB would hold up the event loop.

    shape: the body of a refusal
    """

    def __init__(
        self,
        app: ASGIApp,
        config: ServingConfig,
        token: str | None,
        shape: Callable[[Scope, Refusal], dict[str, Any]] = detail,
    ) -> None:
        self._app = app
        self._token = token
        self._shape = shape
        self._hosts = {name.lower() for name in ("localhost", socket.gethostname(), config.host, *config.allow_hosts)}
        self._max_bytes = config.max_body_mib * MIB
        self._max_requests = config.max_requests
        self._num_bytes = 0  # total size of the bodies in memory
        self._num_requests = 0  # requests in progress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):  # lifespan events
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._refusal(headers)
        if scope["type"] == "websocket":
            refusal = refusal or _foreign_page(headers)
            await (self._app if refusal is None else self._refused(scope, refusal))(scope, receive, send)
            return
        if refusal is not None:
            await self._refused(scope, refusal)(scope, receive, send)
            return
        async with self._body(receive) as body:
            if isinstance(body, Refusal):
                await self._refused(scope, body)(scope, receive, send)
            elif body is not None:
                await self._answer(body, scope, receive, send)

    def _refused(self, scope: Scope, refusal: Refusal) -> JSONResponse:
        return JSONResponse(self._shape(scope, refusal), refusal.status, refusal.headers)

    def _refusal(self, headers: Headers) -> Refusal | None:
        host = headers.get("host", "")
        if not self._is_allowed(host):
            return Refusal(400, f"Host {host[:200]!r} is not a name of this server", "--allow-host adds one")
        if self._token is not None and not hmac.compare_digest(given_token(headers), self._token.encode()):
            problem = f"expected the header Authorization: Bearer TOKEN; our clients send ${TOKEN_VARIABLE}"
            return Refusal(401, problem, headers={"www-authenticate": 'Bearer, Basic realm="toolrl"'})
        if "transfer-encoding" in headers and "content-length" in headers:
            problem = "both a transfer encoding and a length: the end of the body is ambiguous"
            return Refusal(400, problem, headers={"connection": "close"})
        length = headers.get("content-length", "0")
        return self._too_large() if int(length) > self._max_bytes else None

    def _is_allowed(self, header: str) -> bool:
        """Against DNS rebinding: accepts our own names, and IP addresses, which cannot be rebound."""
        with suppress(ValueError):
            host = urlsplit(f"//{header}").hostname or ""
            return host in self._hosts or _is_address(host)
        return False

    def _too_large(self) -> Refusal:
        problem = f"the body has more than {self._max_bytes // MIB} MiB"
        return Refusal(413, problem, "--max-body-mib sets the limit")

    @asynccontextmanager
    async def _body(self, receive: Receive) -> AsyncIterator[deque[bytes] | Refusal | None]:
        """The pieces of the body, counted meanwhile, or a rejection; None if the client disconnected."""
        body, length, more = deque[bytes](), 0, True
        refused: Refusal | None = None
        try:
            while more and refused is None:
                message = await receive()
                if message["type"] == "http.disconnect":
                    yield None
                    return
                part, more = message.get("body", b""), message.get("more_body", False)
                body.append(part)
                length += len(part)
                self._num_bytes += len(part)
                if length > self._max_bytes:
                    refused = self._too_large()
                elif self._num_bytes > BODIES_HELD * self._max_bytes:
                    refused = _busy("too many large requests at a time")
            yield refused or body
        finally:
            self._num_bytes -= length

    async def _answer(self, body: deque[bytes], scope: Scope, receive: Receive, send: Send) -> None:
        if self._num_requests >= self._max_requests:
            refusal = _busy(f"{self._max_requests} requests are in progress")
            await self._refused(scope, refusal)(scope, receive, send)
            return
        self._num_requests += 1
        try:
            await _until_gone(self._app, body, scope, receive, send)
        finally:
            self._num_requests -= 1


def given_token(headers: Headers) -> bytes:
    """Of a Bearer header, of x-api-key, or the password of a URL as http://any:TOKEN@host."""
    kind, _, value = headers.get("authorization", f"Bearer {headers.get('x-api-key', '')}").partition(" ")
    if kind == "Basic":
        with suppress(ValueError):
            return base64.b64decode(value, validate=True).partition(b":")[2]
    return value.encode() if kind == "Bearer" else b""


def _foreign_page(headers: Headers) -> Refusal | None:
    """Browsers let any page open a WebSocket, and send its origin."""
    origin = headers.get("origin")
    if origin is None or urlsplit(origin).netloc == headers.get("host"):
        return None
    return Refusal(403, f"pages of {origin[:200]} may not connect")


async def _until_gone(app: ASGIApp, body: deque[bytes], scope: Scope, receive: Receive, send: Send) -> None:
    """Run the application; cancel it when the client disconnects (or has the complete response)."""

    async def body_once() -> Message:
        if body:
            return {"type": "http.request", "body": body.popleft(), "more_body": bool(body)}
        await gone
        return {"type": "http.disconnect"}

    async def hang_up() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def work() -> None:
        await app(scope, body_once, send)

    gone = asyncio.create_task(hang_up())
    working = asyncio.create_task(work())
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        await asyncio.wait({working})
        gone.cancel()
    if not working.cancelled():
        working.result()


def _busy(problem: str) -> Refusal:
    return Refusal(429, problem, headers={"retry-after": "1"})


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 with timeouts, without tiny chunks. At half of the descriptors, the oldest idle connection is closed.

    A timeout closes the connection a turn of the event loop later, which first reads what has come: the loop may be
    late, and a close with an unread request would lose it.
    """

    _request_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _seen: object = None  # the client's state at the last check
    _since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        self._since = self.loop.time()
        self.timeout_keep_alive = KEEP_ALIVE_S
        self._bound_request()
        if len(self.connections) > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:
            waiting = [each for each in self.connections if isinstance(each, BoundedProtocol) and each.waits]
            min(waiting, key=lambda each: each._since).transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._has_tiny_chunks(data):
            self.send_400_response("The body comes in chunks of a few bytes; send larger ones, or its length.")
            return
        super().data_received(data)
        self._bound_request()

    def timeout_keep_alive_handler(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(0, super().timeout_keep_alive_handler)

    def on_response_complete(self) -> None:
        super().on_response_complete()  # also reads a pipelined request
        self._bound_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._request_timer = _restart(self._request_timer)
        self._write_timer = _restart(self._write_timer)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = _restart(self._write_timer, self.loop.call_later(WRITE_S, self.transport.abort))

    def resume_writing(self) -> None:
        self._write_timer = _restart(self._write_timer)
        super().resume_writing()

    def handle_events(self) -> None:
        """Rejects bare LF line endings, which h11 accepts but a proxy may parse differently, and long heads."""
        if self.conn.their_state is h11.IDLE:
            head = self.conn.trailing_data[0].partition(b"\r\n\r\n")[0]
            if head.count(b"\n") > head.count(b"\r\n"):
                self.send_400_response("Lines of a request end in CR and LF.")
                return
            if len(head) > MAX_HEAD:
                self.send_400_response("The head has more than 64 KiB.")
                return
        super().handle_events()

    def _has_tiny_chunks(self, data: bytes) -> bool:
        """Each is an event of h11, so that one read of 256 kB would hold up the event loop for a second."""
        if data.count(b"\r\n") * SMALL_CHUNK <= max(len(data), FREE_CHUNKS * SMALL_CHUNK):
            return False
        if self.conn.their_state is h11.SEND_BODY:
            return (b"transfer-encoding", b"chunked") in self.headers
        return b"chunked" in data.lower()

    @property
    def waits(self) -> bool:
        """Whether it has no complete request yet."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def _bound_request(self) -> None:
        """Headers and body have separate timeouts, however many pieces they arrive in."""
        state = self.conn.their_state
        idle = state is h11.IDLE and self.cycle is not None and not self.conn.trailing_data[0]  # between two requests
        if (state, idle) == self._seen:
            return
        self._seen = state, idle
        limit_s = HEADER_S if state is h11.IDLE else BODY_S
        timer = self.loop.call_later(limit_s, self._time_out) if self.waits and not idle else None
        self._request_timer = _restart(self._request_timer, timer)

    def _time_out(self) -> None:
        self._request_timer = self.loop.call_later(0, self.transport.abort)


def _restart(timer: asyncio.TimerHandle | None, new: asyncio.TimerHandle | None = None) -> asyncio.TimerHandle | None:
    if timer is not None:
        timer.cancel()
    return new


def bounded_config(gate: Gate, **options: Any) -> uvicorn.Config:
    """The uvicorn settings that all servers share. options: further ones, or other values"""
    common = {"http": BoundedProtocol, "ws": "none", "log_level": "warning", "timeout_graceful_shutdown": SHUTDOWN_S}
    return uvicorn.Config(gate, **{**common, **options})


def serve(app: ASGIApp, config: ServingConfig, websockets: bool = False) -> int:
    """Serve until interrupted. Returns 2, after an error on stderr, if it cannot start.

    websockets: accept them; a message may be as long as a body, and a client that answers no ping has left
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listening = socket.create_server((config.host, config.port), family=family)
    except (OSError, OverflowError, TypeError) as error:  # TypeError: an invalid host name
        where = f"{config.host} port {config.port}"
        sys.stderr.write(f"error: cannot listen on {where} ({error}); choose another --host or --port\n")
        return 2
    with listening, suppress(KeyboardInterrupt):
        try:
            gate = Gate(app, config, find_token(config))
        except ConfigError as error:
            sys.stderr.write(f"error: {error}\n")
            return 2
        _raise_descriptor_limit()
        gc.freeze()  # what is there is never collected, and a pass over it would hold up every client
        wanted = {"ws": "websockets-sansio", "ws_max_size": config.max_body_mib * MIB} if websockets else {}
        settings = bounded_config(gate, **wanted)
        run_async(uvicorn.Server(settings).serve(sockets=[listening]), settings.get_loop_factory())
    return 0


def find_token(config: ServingConfig) -> str | None:
    """Of the file, of the environment or, beyond loopback, a new one. Raises ConfigError."""
    if config.no_token:
        return None
    if (file := config.token_file) is not None:
        try:
            if not file.exists():
                _make_token(file)
            return checked_token(file.read_text().strip(), f"--token-file {file}")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--token-file {file} cannot be used ({error}); name another file") from error
    if (given := service_token()) is not None:
        return given
    if config.host == "localhost" or (_is_address(config.host) and ipaddress.ip_address(config.host).is_loopback):
        return None
    token = secrets.token_urlsafe(32)
    sys.stderr.write(f"clients of this server need {TOKEN_VARIABLE}={token}\n")
    return token


def _make_token(file: Path) -> None:
    """Created atomically; a server that does so at the same time may win."""
    with tempfile.NamedTemporaryFile("w", prefix=f".{file.name}-", dir=file.parent) as new:
        new.write(secrets.token_urlsafe(32) + "\n")
        new.flush()
        with suppress(FileExistsError):
            file.hardlink_to(new.name)


def _is_address(host: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False


def _raise_descriptor_limit() -> None:
    """Raise the soft limit, which is 1,024 on many systems."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = NUM_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, NUM_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
