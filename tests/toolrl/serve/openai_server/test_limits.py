"""What a hostile client of `toolrl serve` may cost: its connections, its requests, and what vLLM's models check."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from typing import Any, Literal

import fastapi
import httpx2
import pytest
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from tests.support.loop_watch import watched_loop
from toolrl.serve.openai_server import requests
from toolrl.serve.openai_server.requests import CheckedRequests
from toolrl.servers import serving

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "a"}


class Item(BaseModel):
    role: Literal["user"]
    content: Any = None


class Conversation(BaseModel):
    """As vLLM's: of many kinds of items, all errors are collected."""

    messages: list[Item] | None = None
    input: str | list[Item] | None = None


def vllms_server() -> FastAPI:
    """As vLLM builds it: a model of the body per path, and our middleware around all."""
    app = FastAPI()
    for path in (CHAT, RESPONSES, MESSAGES):

        @app.post(path)
        async def answer(given: Conversation) -> str:
            return "answer"

    @app.post("/v1/completions")
    async def complete(given: dict[str, Any]) -> int:
        return len(given["prompt"])

    app.add_middleware(CheckedRequests)
    return app


@asynccontextmanager
async def client(app: Any) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://a") as made:
        yield made


@pytest.mark.parametrize(
    ("path", "body", "status", "problem"),
    [
        (CHAT, {"messages": [USER] * 2000}, 200, "answer"),
        (CHAT, {"messages": [USER] * 6667}, 413, "the request has 20003 values; at most 20000 are read"),
        (MESSAGES, {"messages": [USER] * 30 + [{}] * 1000}, 400, "messages[30] is no message or item that is known"),
        (RESPONSES, {"input": [{}] * 400}, 400, "input[0] is no message or item that is known here"),
        (RESPONSES, {"input": [USER] * 501}, 413, "input has 501 entries; at most 500"),
        (RESPONSES, {"input": [{"role": "user", "content": [{}] * 201}]}, 413, "input[0].content has 201 entries"),
        (CHAT, {"messages": [{"role": "user", "content": [1] * 900}]}, 400, "messages[0].content[0] must be an object"),
        (CHAT, {"messages": [USER], "tools": [{"a": [1] * 20_000}]}, 413, "values; at most 20000 are read"),
        (CHAT, {"messages": [{"role": "tool"}]}, 422, "Input should be"),  # few messages: its own error
        ("/v1/completions", {"prompt": [1] * 100_000}, 200, "100000"),
        ("/v1/completions", {"prompt": [1] * 524_289}, 413, "prompt has 524289 entries; at most 524288"),
        ("/v1/completions", {"prompt": [1], "stop": {"a": [1] * 20_000}}, 413, "values; at most 20000"),
    ],
)
async def test_what_vllm_would_check_for_long_is_bounded(path: str, body: Any, status: int, problem: str) -> None:
    async with client(vllms_server()) as asking:
        answer = await asking.post(path, json=body)
        assert (answer.status_code, problem in answer.text) == (status, True), answer.text[:500]


@pytest.mark.parametrize(
    ("body", "kind", "seen"),
    [
        (b'{"messages": "' + rb"\n" * 20_000, "application/json", "the body is no JSON: Unterminated string"),
        (b"[" + b"1," * 10_000 + b"]", "", "the body is no JSON: Expecting value"),
        (b"\xff" * 30_000, "application/vnd.api+json", "can't decode byte 0xff"),
        (b"[1,", "application/json", "vLLM: 3"),  # small: vLLM's own error
        (b"--x\r\n" * 10_000, "multipart/form-data; boundary=x", "vLLM: 50000"),  # not read as JSON
    ],
)
async def test_large_json_that_is_none_is_refused_before_vllm_reads_it_on_its_loop(
    body: bytes, kind: str, seen: str
) -> None:
    app = FastAPI()

    @app.post(CHAT)
    async def answer(request: fastapi.Request) -> str:
        return f"vLLM: {len(await request.body())}"

    app.add_middleware(CheckedRequests)
    async with client(app) as asking:
        response = await asking.post(CHAT, content=body, headers={"content-type": kind} if kind else {})
    assert seen in response.text
    assert response.status_code == (200 if seen.startswith("vLLM") else 400)


async def test_our_checks_of_large_requests_are_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the text, of arguments in it, and of each message."""
    loop_thread = []

    def noted(*given: Any) -> None:
        loop_thread.append(asyncio._get_running_loop())
        check(*given)

    check = requests._check_entries
    monkeypatch.setattr(requests, "_check_entries", noted)

    async def echo(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    arguments = json.dumps({"a": "It is cold. " * 3000})
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    async with client(CheckedRequests(echo)) as asking:
        for path, body in {
            CHAT: {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]},
            RESPONSES: {"input": [USER, item]},
            MESSAGES: {"messages": [{"role": "user", "content": arguments}]},
            f"{MESSAGES}/count_tokens": {"messages": [{"role": "user", "content": arguments}]},
            "/v1/completions": {"prompt": [7] * 20_000},
        }.items():
            text = json.dumps(body).encode()
            with watched_loop():
                assert (await asking.post(path, content=text)).status_code == 200
    assert loop_thread == [None] * 4


async def test_requests_at_a_time_and_their_bodies_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MAX_REQUESTS", 2)
    monkeypatch.setattr(requests, "MAX_BODY", 1000)
    release = asyncio.Event()
    app = FastAPI()

    @app.post("/wait")
    async def wait(given: dict[str, Any]) -> str:
        await release.wait()
        return "done"

    app.add_middleware(CheckedRequests)
    async with client(app) as asking:
        waiting = [asyncio.create_task(asking.post("/wait", json={"a": "b" * 900})) for _ in range(2)]
        await asyncio.sleep(0.1)
        refused = await asking.post("/wait", json={})
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        monkeypatch.setattr(requests, "MAX_REQUESTS", 100)
        monkeypatch.setattr(requests, "BODIES_HELD", 2)
        refused = await asking.post("/wait", json={"a": "b" * 900})
        assert refused.status_code == 429 and "too many large requests" in refused.text
        release.set()
        assert [each.status_code for each in await asyncio.gather(*waiting)] == [200, 200]
        assert (await asking.post("/wait", json={"a": "b" * 900})).status_code == 200  # what was held is free


async def test_its_connections_have_the_limits_of_our_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a head, a head that goes on, and a body in chunks of a byte, to a server that vLLM configures."""
    monkeypatch.setattr(serving, "HEADER_S", 0.3)
    app = vllms_server()

    async def sent(port: int, *pieces: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with closing(writer), suppress(ConnectionError):
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0.1)
            return await asyncio.wait_for(reader.read(1000), 30)
        return b""

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))  # as vLLM: connections of its own choice
        app.state.server = server
        running = asyncio.create_task(server.serve(sockets=[listening]))
        port = listening.getsockname()[1]
        while not server.started:
            await asyncio.sleep(0.01)
        head = b"POST %b HTTP/1.1\r\nhost: localhost\r\n" % CHAT.encode()
        assert await sent(port, b"POST /x HT") == b""
        assert await sent(port, head, b"a: b\r\n", b"a: b\r\n", b"a: b\r\n") == b""
        monkeypatch.setattr(serving, "HEADER_S", 60.0)
        chunks = head + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 5000
        assert b"chunks of a few bytes" in await sent(port, chunks)
        body = json.dumps({"messages": [USER]}).encode()
        whole = head + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        assert (await sent(port, whole)).startswith(b"HTTP/1.1 200")
        server.should_exit = True
        await running


async def test_without_vllms_server_there_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):

        async def receive() -> dict[str, str]:
            return {"type": "lifespan.shutdown"}

        async def send(_: Any) -> None: ...

        app = vllms_server()
        await app({"type": "lifespan", "app": app, "state": {}}, receive, send)
    assert "connections have no time limits" in caplog.text
