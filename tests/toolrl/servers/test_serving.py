"""How all three servers listen: token, Host, sizes, slow clients, and clients that hang up."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx2
import psutil
import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.types import Message, Scope

from tests.conftest import ROOT
from tests.support.service import free_port, listeners, service, wait_for
from toolrl.envs.openenv import server as env_server
from toolrl.sandbox import server as sandbox_server
from toolrl.sandbox.client import RemoteSandbox
from toolrl.sandbox.local import LocalSandbox
from toolrl.servers import serving
from toolrl.servers.bounds import MAX_PARTS, Bounds, TooMuchError
from toolrl.servers.serving import BoundedProtocol, Gate, ServingConfig, find_token, new_app
from toolrl.tools.retrieval import server as retrieval_server
from toolrl.tools.retrieval.search import Passage
from verl.envs.registry import build_env_factory
from verl.errors import ConfigError, ServiceDownError
from verl.host.services import TOKEN_VARIABLE, check_urls, service_headers
from verl.units import MIB

LOCAL = ServingConfig("127.0.0.1", 0)
JSON = {"content-type": b"application/json"}
CHALLENGE = 'Bearer, Basic realm="toolrl"'  # the second for browsers, which ask for a password


def app() -> FastAPI:
    made = new_app("test")

    @made.post("/size")
    async def size(request: Request) -> int:
        return len(await request.body())

    @made.get("/big")
    async def big() -> Response:
        return Response(bytes(64 * MIB))

    @made.get("/health")
    async def health() -> str:
        return "ok"

    return made


def ask(
    gate: Gate, *, host: str = "localhost", body: bytes = b"", headers: dict[str, bytes] | None = None
) -> httpx2.Response:
    async def once() -> httpx2.Response:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(gate), base_url="http://localhost") as client:
            return await client.post("/size", content=body, headers={"host": host.encode(), **(headers or {})})

    return asyncio.run(once())


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8080", 200),
        ("LOCALHOST", 200),
        ("127.0.0.1:8080", 200),
        ("[::1]:8080", 200),
        ("10.1.2.3", 200),
        (socket.gethostname(), 200),
        ("sandbox.svc:8080", 200),
        ("evil.example", 400),
        ("localhost.evil.example:8080", 400),
        ("[::1", 400),
        ("", 400),
    ],
)
def test_a_foreign_host_header_is_refused(host: str, status: int) -> None:
    gate = Gate(app(), ServingConfig("127.0.0.1", 0, allow_hosts=("sandbox.svc",)), None)
    answer = ask(gate, host=host)
    assert answer.status_code == status and (status == 200 or "--allow-host" in answer.text)


def test_without_the_token_nothing_is_answered() -> None:
    gate = Gate(app(), LOCAL, "s3cret")
    for given in (b"", b"Bearer wrong", b"s3cret", b"Bearer \xe9", b"Basic s3cret"):
        answer = ask(gate, headers={"authorization": given})
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == CHALLENGE
        assert TOKEN_VARIABLE in answer.text and "s3cret" not in answer.text
    assert ask(gate, headers={"x-api-key": b"wrong"}).status_code == 401
    for headers in ({"authorization": b"Bearer s3cret"}, {"x-api-key": b"s3cret"}):
        assert ask(gate, headers=headers).status_code == 200


def test_a_token_is_made_beyond_loopback_and_taken_where_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert [find_token(ServingConfig(host, 0)) for host in ("127.0.0.1", "127.0.0.2", "::1", "localhost")] == [None] * 4
    assert not capsys.readouterr().err
    made = [find_token(ServingConfig(host, 0)) for host in ("0.0.0.0", "::", "10.0.0.1", "node7")]
    lines = capsys.readouterr().err.splitlines()
    assert len(set(made)) == 4
    assert all(token and token in line for token, line in zip(made, lines, strict=True))
    assert find_token(ServingConfig("0.0.0.0", 0, no_token=True)) is None
    file = tmp_path / "token"
    first = find_token(ServingConfig("127.0.0.1", 0, token_file=file))
    assert first == file.read_text().strip() == find_token(ServingConfig("0.0.0.0", 0, token_file=file))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    monkeypatch.setenv(TOKEN_VARIABLE, "given")
    assert find_token(LOCAL) == "given" and service_headers() == {"Authorization": "Bearer given"}
    assert not capsys.readouterr().err


def test_servers_that_make_the_same_token_file_at_a_time_have_one_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ServingConfig("0.0.0.0", 0, token_file=tmp_path / "token")
    others: list[str | None] = []

    def made_while_another_starts(num_bytes: int) -> str:
        if not others:
            others.append("")
            others[0] = find_token(config)
        return f"token-{len(list(tmp_path.iterdir()))}"

    monkeypatch.setattr(serving.secrets, "token_urlsafe", made_while_another_starts)
    assert find_token(config) == others[0] != ""
    assert list(tmp_path.iterdir()) == [tmp_path / "token"]


def test_tokens_that_no_header_can_hold_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "terms").write_text("two terms")
    (tmp_path / "bytes").write_bytes(b"\xff")
    for name in ("empty", "terms", "bytes", "no/folder"):
        with pytest.raises(ConfigError, match="--token-file") as raised:
            find_token(ServingConfig("0.0.0.0", 0, token_file=tmp_path / name))
        assert "two terms" not in str(raised.value)
    monkeypatch.setenv(TOKEN_VARIABLE, "clé")
    with pytest.raises(ConfigError, match=TOKEN_VARIABLE):
        service_headers()


def test_bodies_beyond_the_limit_are_refused_before_they_are_held() -> None:
    gate = Gate(app(), ServingConfig("127.0.0.1", 0, max_body_mib=1), None)
    assert ask(gate, body=bytes(MIB)).json() == MIB
    answer = ask(gate, body=bytes(MIB + 1))
    assert answer.status_code == 413 and "more than 1 MiB" in answer.text

    async def in_pieces() -> tuple[int, int]:
        """Without a length, as chunked transfer sends them: refused after the piece that is too much."""
        pieces, statuses = 0, []

        async def receive() -> Message:
            nonlocal pieces
            pieces += 1
            return {"type": "http.request", "body": bytes(MIB // 2), "more_body": True}

        async def send(message: Message) -> None:
            statuses.append(message.get("status"))

        scope: Scope = {"type": "http", "method": "POST", "path": "/size", "headers": [(b"host", b"localhost")]}
        await gate(scope, receive, send)
        return pieces, statuses[0]

    assert asyncio.run(in_pieces()) == (3, 413)
    assert ask(gate, body=b"x").json() == 1  # what was refused is not counted any more


def test_json_beyond_its_bounds_is_refused_with_the_limit() -> None:
    made = new_app("test", bounds=Bounds(values=30_000, entries={"few": 2}))

    @made.post("/size")
    async def size(body: dict[str, Any]) -> int:
        return len(body)

    gate = Gate(made, LOCAL, None)
    many = b'{"a": [' + b"1," * 30_000 + b"1]}"
    lists = b'{"a": [[' + b"[]," * (MAX_PARTS + 1) + b"[]]]}"
    keys = b'{"a": {' + b",".join(b'"%d": 1' % number for number in range(MAX_PARTS + 1)) + b"}}"
    for body, problem in {
        many: "more than 30000 values",
        keys: "an object has more than 20000 keys",
        b'{"few": [1, 2, 3]}': "few has 3 entries; at most 2",
    }.items():
        answer = ask(gate, body=body, headers=JSON)
        assert answer.status_code == 413 and problem in answer.text, answer.text
    for text in (lists, b"[" + b'{"a": 1, "b": 2},' * (MAX_PARTS // 3 + 1) + b"1]"):
        with pytest.raises(TooMuchError, match=f"more than {MAX_PARTS} lists, objects and keys"):
            Bounds(values=1_000_000).read(text)
    assert ask(gate, body=b'{"few": [1, 2], "text": "' + b"[," * 100_000 + b'"}', headers=JSON).json() == 2
    assert ask(gate, body=many[:-1], headers=JSON).status_code == 413
    assert ask(gate, body=b'{"a": "' + b"x" * 30_000, headers=JSON).status_code == 422
    with pytest.raises(TooMuchError, match="more than 1 MiB"):
        Bounds(max_mib=1).read(" " * ((1 << 20) + 1))
    for number in (b"7" * 30_000, b"-0." + b"7" * 30_000):
        assert "more than 4000 digits" in ask(gate, body=b'{"a": ' + number + b"}", headers=JSON).text


@pytest.mark.parametrize("text", ["1", '{"a": [1.5, null, {"b": "\\ud83d"}], "c": -0.0}', '"x"', " [ ] "])
@pytest.mark.parametrize("space", ["", " " * 30_000])
def test_large_json_is_read_like_any(text: str, space: str) -> None:
    given = (space + text).encode()
    assert Bounds().read(given) == json.loads(text)


def test_json_within_json_has_bounds_too() -> None:
    call = {"function": {"name": "f", "arguments": "[" + "[]," * (MAX_PARTS + 1) + "[]]"}}
    with pytest.raises(TooMuchError, match="lists, objects"):
        Bounds(values=1_000_000).read(json.dumps({"messages": [{"tool_calls": [call]}]}))
    content = {"content": call["function"]["arguments"]}
    assert Bounds().read(json.dumps({"messages": [content]})) == {"messages": [content]}


class Conversation:
    """A request whose client is scripted: it hangs up, or keeps its body back."""

    def __init__(self, gate: Gate, body: bytes = b"", ends: bool = True) -> None:
        self.hung_up = asyncio.Event()
        self.statuses: list[int] = []
        self._messages = [{"type": "http.request", "body": body, "more_body": not ends}]
        scope: Scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"host", b"localhost")]}
        self.task = asyncio.create_task(gate({**scope}, self._receive, self._send))

    async def _receive(self) -> Message:
        if self._messages:
            return self._messages.pop()
        await self.hung_up.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.statuses.append(message["status"])


def working(started: asyncio.Event, ended: list[str]) -> Callable[..., Awaitable[None]]:
    async def work(*_: object) -> None:
        started.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    return work


async def test_work_is_cancelled_when_the_client_hangs_up_and_its_place_is_free_at_once() -> None:
    started, ended = asyncio.Event(), list[str]()
    gate = Gate(working(started, ended), ServingConfig("127.0.0.1", 0, max_requests=1), None)
    first = Conversation(gate)
    await started.wait()
    second = Conversation(gate)
    await second.task
    assert second.statuses == [429]
    first.hung_up.set()
    await first.task
    assert ended == ["cancelled"] and not first.statuses
    started.clear()
    third = Conversation(gate)
    await started.wait()
    third.task.cancel()  # as a shutdown does
    await asyncio.wait({third.task})
    assert ended == ["cancelled"] * 2


async def test_bodies_that_are_held_have_a_bound_together() -> None:
    started, ended = asyncio.Event(), list[str]()
    gate = Gate(working(started, ended), ServingConfig("127.0.0.1", 0, max_body_mib=1), None)
    slow = [Conversation(gate, bytes(MIB), ends=False) for _ in range(serving.BODIES_HELD)]
    await asyncio.sleep(0.05)
    late = Conversation(gate, bytes(MIB))
    await late.task
    assert late.statuses == [429]
    slow[0].hung_up.set()
    await slow[0].task
    Conversation(gate, bytes(MIB))
    await started.wait()


SMALL = """
import argparse, resource, sys
from tests.toolrl.servers.test_serving import app
from toolrl.servers import serving
from toolrl.envs.openenv import server as env_server
from toolrl.tools.retrieval import server as retrieval_server
serving.HEADER_S = serving.BODY_S = serving.WRITE_S = float(sys.argv[3])
if sys.argv[4] != "0":
    serving.NUM_DESCRIPTORS = int(sys.argv[4])
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[4]), int(sys.argv[4])))
parser = argparse.ArgumentParser()
serving.add_serving_arguments(parser, port=0, max_body_mib=1)
config = serving.serving_config(parser.parse_args(["--host", sys.argv[1], "--port", sys.argv[2]]))
sys.exit(serving.serve(app(), config))
"""


@contextmanager
def small_server(host: str = "127.0.0.1", limit_s: float = 30.0, descriptors: int = 0) -> Iterator[tuple[int, Path]]:
    """Its port, and the file of what it has written to stderr."""
    port = free_port()
    with ExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory()), "stderr")
        written = stack.enter_context(log.open("w"))
        command = [sys.executable, "-c", SMALL, host, str(port), str(limit_s), str(descriptors)]
        environment = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
        process = subprocess.Popen(command, cwd=ROOT, stderr=written, env=environment)
        stack.callback(process.wait)
        stack.callback(process.kill)
        wait_for(f"http://127.0.0.1:{port}/health", process)
        yield port, log


def closed_within(connection: socket.socket, limit_s: float) -> bool:
    """Whether the server ends the connection in that time."""
    connection.settimeout(limit_s)
    try:
        while connection.recv(65536):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return True


HALF_HEAD = b"POST /size HTTP/1.1\r\nhost: localhost\r\n"
HALF_BODY = HALF_HEAD + b"content-length: 10\r\n\r\n12345"
WHOLE = HALF_HEAD + b"content-length: 1\r\n\r\n1"


NO_BODY = HALF_HEAD + b"content-length: 10\r\n\r\n"


@pytest.mark.long
@pytest.mark.parametrize("sent", [b"", HALF_HEAD, HALF_BODY, WHOLE + HALF_HEAD, WHOLE + HALF_BODY])
def test_a_request_that_does_not_end_ends_its_connection(sent: bytes) -> None:
    with small_server(limit_s=1.0) as (port, _), closing(socket.create_connection(("127.0.0.1", port))) as slow:
        with suppress(ConnectionError):  # a busy machine may come after its end
            slow.sendall(sent)
            time.sleep(0.5)
            slow.sendall(b"p")  # a byte now and then wins no time
        assert closed_within(slow, 20.0)


@pytest.mark.long
@pytest.mark.parametrize("sent", [WHOLE + NO_BODY, WHOLE + WHOLE + NO_BODY])
def test_a_pipelined_request_has_the_same_time_limit(sent: bytes) -> None:
    """Its head is read when the first is answered, and nothing comes after it."""
    with small_server(limit_s=1.0) as (port, _), closing(socket.create_connection(("127.0.0.1", port))) as slow:
        slow.sendall(sent)
        assert closed_within(slow, 20.0)


@pytest.mark.long
def test_an_unread_answer_ends_its_connection() -> None:
    def read_after(port: int, pause_s: float) -> int:
        with closing(socket.create_connection(("127.0.0.1", port))) as slow:
            slow.sendall(b"GET /big HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            time.sleep(pause_s)
            with suppress(ConnectionError):
                return sum(map(len, iter(lambda: slow.recv(MIB), b"")))
            return 0

    with small_server(limit_s=1.0) as (port, _):
        assert any(read_after(port, pause_s) < 64 * MIB for pause_s in (3, 10, 30))


@pytest.mark.long
def test_slow_clients_do_not_stop_others() -> None:
    """As many as the process has descriptors; those that wait longest make room."""
    with small_server(descriptors=200) as (port, _), ExitStack() as stack:
        slow = [stack.enter_context(closing(socket.create_connection(("127.0.0.1", port)))) for _ in range(200)]
        for each in slow:
            each.sendall(HALF_HEAD)
        for _ in range(5):
            answer = httpx2.post(f"http://127.0.0.1:{port}/size", content=b"123", timeout=30, trust_env=False)
            assert answer.json() == 3


@pytest.mark.slow
def test_a_thousand_slow_clients_do_not_stop_others() -> None:
    with small_server() as (port, _), ExitStack() as stack:
        slow = [stack.enter_context(closing(socket.create_connection(("127.0.0.1", port)))) for _ in range(1000)]
        for number, each in enumerate(slow):
            each.sendall((HALF_HEAD, HALF_BODY, b"")[number % 3])
        for _ in range(20):
            answer = httpx2.post(f"http://127.0.0.1:{port}/size", content=b"123", timeout=30, trust_env=False)
            assert answer.json() == 3


@pytest.mark.long
def test_a_server_beyond_loopback_prints_its_token_once_and_requires_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with small_server("0.0.0.0") as (port, log):
        url = f"http://127.0.0.1:{port}/health"
        (line,) = log.read_text().splitlines()
        assert httpx2.get(url, trust_env=False).status_code == 401
        monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
        with pytest.raises(ServiceDownError, match=f"returned status 401.*{TOKEN_VARIABLE}"):
            asyncio.run(check_urls("sandbox", [url], "Start it"))
        monkeypatch.setenv(TOKEN_VARIABLE, line.rpartition("=")[2])
        assert httpx2.get(url, headers=service_headers(), trust_env=False).json() == "ok"
        asyncio.run(RemoteSandbox([f"http://127.0.0.1:{port}"]).check_services())


def test_numbers_that_json_cannot_hold_and_huge_inputs_are_refused_without_being_repeated() -> None:
    made = new_app("test")

    @made.post("/")
    async def add(numbers: list[int]) -> int:
        return sum(numbers)

    async def post(body: str) -> httpx2.Response:
        transport = httpx2.ASGITransport(made)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post("/", content=body, headers={"content-type": "application/json"})

    for body in ("[NaN]", "NaN", "[Infinity, -Infinity]", json.dumps(["x" * 100_000] * 100)):
        answer = asyncio.run(post(body))
        assert answer.status_code == 422 and answer.json()["detail"][0]["msg"] and len(answer.text) < 10_000


class NoPassages:
    async def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        return [[] for _ in queries]

    async def close(self) -> None:
        pass


SERVERS: dict[str, tuple[Callable[[], FastAPI], str, object, int]] = {  # with a request, and its status
    "sandbox": (
        lambda: sandbox_server.make_app(LocalSandbox(1, "none")),
        "/run_code",
        {"code": "1", "language": "cobol"},
        400,
    ),
    "environment": (
        lambda: env_server.build_app("shop", build_env_factory("shop"), (), 60.0, 8),
        "/mcp",
        {"jsonrpc": "2.0", "method": "openenv/session/create"},
        200,
    ),
    "retrieval": (lambda: retrieval_server.application(NoPassages(), 1), "/retrieve", {"query": "x"}, 200),
}


def post_to(server: str, body: bytes, content_type: str | None) -> httpx2.Response:
    make, path, _, _ = SERVERS[server]

    async def once() -> httpx2.Response:
        transport = httpx2.ASGITransport(Gate(make(), LOCAL, None))
        headers = {} if content_type is None else {"content-type": content_type}
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(path, content=body, headers=headers)

    return asyncio.run(once())


@pytest.mark.parametrize("server", SERVERS)
def test_text_plain_form_multipart_and_no_type_are_refused(server: str) -> None:
    """These are what a page of another site may send without being asked for permission."""
    *_, request, status = SERVERS[server]
    body = json.dumps(request).encode()
    assert post_to(server, body, "application/json").status_code == status
    for other in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", None):
        assert post_to(server, body, other).status_code == 422


NOT_READABLE = {
    "lists 200,000 deep": b"[" * 200_000 + b"]" * 200_000,
    "objects 150,000 deep": b'{"a":' * 150_000 + b"1" + b"}" * 150_000,
    "an integer of 5,000 digits": b'{"query": ' + b"9" * 5000 + b"}",
    "noise": bytes(range(256)),
    "bytes that are no UTF-8": b'{"query": "\xff"}',
    "half of it": b'{"query": "x',
    "nothing": b"",
    "null": b"null",
}


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("body", list(NOT_READABLE.values()), ids=list(NOT_READABLE))
def test_deep_json_long_integers_and_noise_are_refused(server: str, body: bytes) -> None:
    answer = post_to(server, body, "application/json")
    assert answer.status_code in (400, 422) and answer.json()["detail"] and len(answer.text) < 1000


AFTER = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"  # behind the body of another, or inside it
CHUNKED = b"transfer-encoding: chunked\r\n"
AMBIGUOUS = {
    "a length and a transfer encoding": HALF_HEAD + b"content-length: 6\r\n" + CHUNKED + b"\r\n0\r\n\r\n" + AFTER,
    "two lengths": HALF_HEAD + b"content-length: 1\r\ncontent-length: 2\r\n\r\n12" + AFTER,
    "two lengths in one": HALF_HEAD + b"content-length: 1, 2\r\n\r\n12" + AFTER,
    "a negative length": HALF_HEAD + b"content-length: -1\r\n\r\n1" + AFTER,
    "a length with a sign": HALF_HEAD + b"content-length: +1\r\n\r\n1" + AFTER,
    "a length of 5,000 digits": HALF_HEAD + b"content-length: " + b"9" * 5000 + b"\r\n\r\n1" + AFTER,
    "a negative chunk": HALF_HEAD + CHUNKED + b"\r\n-1\r\n1\r\n0\r\n\r\n" + AFTER,
    "chunks by bare LF": HALF_HEAD + CHUNKED + b"\r\n1\n1\n0\n\n" + AFTER,
    "another transfer encoding": HALF_HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n" + AFTER,
    "a bare LF": HALF_HEAD + b"x: y\ncontent-length: 1\r\n\r\n1" + AFTER,
    "bare LF alone": (WHOLE + AFTER).replace(b"\r\n", b"\n"),
    "a head that a bare LF ends": HALF_HEAD + b"x: y\n\n" + AFTER,
    "a bare CR": (WHOLE + AFTER).replace(b"\r\n", b"\r") + b"\r\n\r\n",
    "a blank before a colon": HALF_HEAD + b"content-length : 1\r\n\r\n1" + AFTER,
    "a name with NUL": HALF_HEAD + b"x: y\r\ncontent-length\0: 1\r\n\r\n1" + AFTER,
    "no host": b"GET /health HTTP/1.1\r\n\r\n" + AFTER,
    "noise": bytes(range(256)) * 4 + b"\r\n\r\n" + AFTER,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00" + b"\r\n\r\n" + AFTER,
}


@pytest.fixture(scope="module")
def small_port() -> Iterator[int]:
    with small_server() as (port, _):
        yield port


def all_answers(port: int, *pieces: bytes) -> list[bytes]:
    """The status lines of what comes until the server ends the connection."""
    with closing(socket.create_connection(("127.0.0.1", port), timeout=20)) as connection:
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(0.05 * (len(pieces) > 1))
        received = b""
        with suppress(ConnectionError):  # it need not have read all that was sent
            while more := connection.recv(65536):
                received += more
    return [part.partition(b"\r\n")[0] for part in received.split(b"HTTP/1.1 ")[1:]]


@pytest.mark.parametrize("sent", list(AMBIGUOUS.values()), ids=list(AMBIGUOUS))
def test_two_lengths_bare_line_ends_and_noise_are_answered_400_once(sent: bytes, small_port: int) -> None:
    """A proxy may see other requests in them than the server does."""
    assert all_answers(small_port, sent) == [b"400 Bad Request"]
    assert httpx2.get(f"http://127.0.0.1:{small_port}/health", trust_env=False).json() == "ok"


@pytest.mark.parametrize("head", [b"", HALF_HEAD + b"content-length: 0\r\n\r\n"])
def test_chunks_of_a_byte_are_refused(head: bytes, small_port: int) -> None:
    """Also those of a connection's second request. Lines of a few bytes within a body of known length are none."""
    chunked = HALF_HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 5000
    assert all_answers(small_port, head + chunked)[-1] == b"400 Bad Request"
    lines = b"a\r\n" * 5000
    whole = HALF_HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(lines) + lines
    assert all_answers(small_port, whole) == [b"200 OK"]


def test_line_ends_count_however_the_requests_are_cut(small_port: int) -> None:
    last = AFTER.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    for cut in (len(HALF_HEAD) - 1, len(HALF_HEAD), len(WHOLE) - 3, len(WHOLE), len(WHOLE) + 5):
        assert all_answers(small_port, (WHOLE + last)[:cut], (WHOLE + last)[cut:]) == [b"200 OK"] * 2
    lines = HALF_HEAD + b"content-length: 3\r\n\r\n1\n2"  # line ends of a body are its own
    assert all_answers(small_port, lines + last) == [b"200 OK"] * 2
    bare = last.replace(b"\r\nconn", b"\nconn")
    assert all_answers(small_port, WHOLE + bare) == [b"200 OK", b"400 Bad Request"]
    assert all_answers(small_port, bare[:-30], bare[-30:]) == [b"400 Bad Request"]


@pytest.mark.long
def test_descriptors_of_1100_half_requests_come_back_when_they_are_closed() -> None:
    with small_server() as (port, _):
        ((_, pid),) = listeners(port)

        def num_descriptors() -> int:
            return len(list(Path(f"/proc/{pid}/fd").iterdir()))

        before = num_descriptors()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
            with ExitStack() as stack:
                for number in range(1100):
                    half = stack.enter_context(closing(socket.create_connection(("127.0.0.1", port))))
                    half.sendall((HALF_HEAD, HALF_BODY)[number % 2])
                answer = httpx2.post(f"http://127.0.0.1:{port}/size", content=b"123", timeout=30, trust_env=False)
                assert answer.json() == 3 and num_descriptors() >= before + 1100
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(300):
            if num_descriptors() <= before:
                return
            time.sleep(0.1)
        raise AssertionError(f"{num_descriptors()} descriptors, {before} before")


@pytest.mark.long
def test_all_three_servers_listen_to_this_machine_alone(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": 1, "contents": "Rome"}')
    for command in (
        ("toolrl.sandbox.server", "--isolation", "none", "--workers", "1"),
        ("toolrl.envs.openenv.server", "--env", "shop"),
        ("toolrl.tools.retrieval.server", "--corpus", str(corpus)),
    ):
        port = free_port()
        with service("-m", *command, "--port", str(port), url=f"http://127.0.0.1:{port}/health") as process:
            assert listeners(port) == {("127.0.0.1", process.pid)}
            started = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
            listening = [each for each in psutil.net_connections("inet") if each.status == psutil.CONN_LISTEN]
            assert {each.laddr.port for each in listening if each.pid in started} == {port}


@pytest.mark.parametrize("host", ["no.such.host.invalid", "256.256.256.256", "a..b", "ä..b", "::zz", "x" * 70])
def test_an_unavailable_host_is_a_one_line_error(host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": 1, "contents": "Rome"}')
    for server, argv in (
        (sandbox_server, ["--isolation", "none"]),
        (env_server, ["--env", "shop"]),
        (retrieval_server, ["--corpus", str(corpus)]),
    ):
        assert server.main([*argv, "--host", host]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: cannot listen on {host} port")


@pytest.mark.parametrize(
    ("server", "word", "problem"),
    [
        (sandbox_server, "--max-timeout-s=nan", "'nan' is not a positive number"),
        (sandbox_server, "--max-timeout-s=inf", "'inf' is not a positive number"),
        (sandbox_server, "--workers=0", "'0' is not a whole number of at least 1"),
        (sandbox_server, "--max-body-mib=-1", "'-1' is not a whole number of at least 1"),
        (env_server, "--max-episodes=0", "'0' is not a whole number of at least 1"),
        (env_server, "--idle-s=0", "'0' is not a positive number"),
        (retrieval_server, "--topk=1e3", "'1e3' is not a whole number of at least 1"),
    ],
)
def test_a_limit_that_limits_nothing_or_everything_is_refused(
    server: ModuleType, word: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        server.main([word])
    assert raised.value.code == 2
    assert f"argument {word.partition('=')[0]}: {problem}" in capsys.readouterr().err


HEAD = b"POST /size HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4\r\n\r\n"


@pytest.mark.parametrize(
    ("before", "late"),
    [
        ((b"", b""), HEAD + b"four"),  # a new connection
        ((HEAD + b"four", b"4"), HEAD + b"four"),  # an idle one
        ((HEAD + b"four" + HEAD[:20], b"4"), HEAD[20:] + b"four"),  # the second part of a head
        ((HEAD + b"one", b""), b"1"),  # of a body
    ],
    ids=["new", "idle", "head", "body"],
)
async def test_a_request_arriving_at_its_deadline_is_answered(
    before: tuple[bytes, bytes], late: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop is busy as the timer is due: the request has come, and is not read yet."""
    limit_s = 100.0
    for name in ("HEADER_S", "BODY_S", "KEEP_ALIVE_S"):
        monkeypatch.setattr(serving, name, limit_s)
    loop = asyncio.get_running_loop()
    own_time, ahead_s = loop.time, 0.0
    monkeypatch.setattr(loop, "time", lambda: own_time() + ahead_s)
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as client:
        server = uvicorn.Server(uvicorn.Config(Gate(app(), LOCAL, None), http=BoundedProtocol, ws="none"))
        running = asyncio.create_task(server.serve(sockets=[listening]))
        client.setblocking(False)
        await loop.sock_connect(client, listening.getsockname())
        await loop.sock_sendall(client, before[0])
        if before[1]:
            assert (await loop.sock_recv(client, 1000)).endswith(before[1])
        while not server.server_state.connections:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        (protocol,) = server.server_state.connections
        assert isinstance(protocol, BoundedProtocol)
        timer = protocol._request_timer or protocol.timeout_keep_alive_task
        assert timer is not None
        loop.call_at(timer.when() - 1e-9, client.send, late)
        ahead_s = limit_s
        answer = await asyncio.wait_for(loop.sock_recv(client, 1000), 30)
        assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"4"), answer
        server.should_exit = True
        await running
