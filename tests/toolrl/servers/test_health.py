"""Servers that are stopped: noticed in time, named, used again when they are back; slow ones are left alone."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.episodes import respond
from tests.support.service import free_port, service
from toolrl.envs.openenv.remote import RemoteFactory
from toolrl.sandbox.client import RemoteSandbox
from toolrl.servers.health import TICKS, HealthWatch
from toolrl.tools.retrieval.http_retriever import HttpRetriever
from verl.envs.registry import build_tasks
from verl.errors import ServiceDownError

TIMEOUT_S = 1.5
PROCESS_S = 4.0  # where servers are processes, which a busy machine may hold up
URL = "http://server/health"


class Server:
    """Answers /health, unless it is silent; to /work, on request."""

    def __init__(self) -> None:
        self.on = asyncio.Event()
        self.on.set()
        self.worked = asyncio.Event()
        self.status = 200
        self.latency_s = 0.0
        self.asked = 0

    async def answer(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/work":
            await self.worked.wait()
        else:
            self.asked += 1
            await asyncio.sleep(self.latency_s)
        await self.on.wait()
        return httpx2.Response(self.status)


@asynccontextmanager
async def watched() -> AsyncIterator[tuple[Server, HealthWatch, httpx2.AsyncClient]]:
    server = Server()
    async with httpx2.AsyncClient(transport=httpx2.MockTransport(server.answer), base_url="http://server") as client:
        watch = HealthWatch("a server", URL, TIMEOUT_S, client)
        yield server, watch, client
        watch.close()


async def work(watch: HealthWatch, client: httpx2.AsyncClient) -> int:
    async with watch.guard():
        return (await client.post("/work", timeout=None)).status_code


def run(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scene, 100))


async def test_requests_to_a_silent_server_end_and_it_is_used_again_when_it_recovers() -> None:
    async with watched() as (server, watch, client):
        server.on.clear()
        lost = await asyncio.gather(*(work(watch, client) for _ in range(3)), return_exceptions=True)
        assert all(isinstance(each, ServiceDownError) for each in lost)
        assert all(f"a server: {URL} has not answered for 1.5 s (no answer)" in str(each) for each in lost)
        asked_before = server.asked
        with pytest.raises(ServiceDownError, match="has not answered"):
            await work(watch, client)
        server.on.set()
        server.worked.set()
        while watch.problem:
            await asyncio.sleep(0.01)
        assert server.asked >= asked_before
        assert await work(watch, client) == 200


@pytest.mark.long
@pytest.mark.parametrize("held_up", ["server", "slow work", "own loop"])
async def test_processes_that_resume_in_time_or_are_slow_cost_nothing(held_up: str) -> None:
    async with watched() as (server, watch, client):
        working = asyncio.create_task(work(watch, client))
        await asyncio.sleep(0.2)
        if held_up == "server":
            server.on.clear()
            await asyncio.sleep(TIMEOUT_S / 3)
            server.on.set()
        elif held_up == "slow work":
            await asyncio.sleep(2 * TIMEOUT_S)
            assert server.asked > 3
        else:
            time.sleep(2 * TIMEOUT_S)
        await asyncio.sleep(0.1)
        assert not working.done()
        server.worked.set()
        assert await working == 200 and not watch.problem


async def test_a_gateway_error_for_a_dead_server_is_no_answer() -> None:
    async with watched() as (server, watch, client):
        server.status = 503
        with pytest.raises(ServiceDownError, match="returned status 503"):
            await work(watch, client)


def wait_in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop's clock shows the time that was waited for, and no other: nothing here waits for another process."""
    loop = asyncio.get_running_loop()
    select, now = loop._selector.select, loop.time()  # type: ignore[attr-defined]

    def skip(timeout: float | None) -> Any:
        nonlocal now
        found = select(0)
        now += 0 if found else timeout or 0
        return found

    monkeypatch.setattr(loop, "time", lambda: now)
    monkeypatch.setattr(loop._selector, "select", skip)  # type: ignore[attr-defined]


async def test_a_gateway_that_takes_its_time_wins_none(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_in_no_time(monkeypatch)
    loop = asyncio.get_running_loop()
    async with watched() as (server, watch, client):
        server.status, server.latency_s = 502, 0.8 * TIMEOUT_S / TICKS
        began = loop.time()
        with pytest.raises(ServiceDownError, match="returned status 502"):
            await work(watch, client)
        assert loop.time() - began <= TIMEOUT_S  # 1.8 of it with the time of its answers


async def test_an_error_of_the_request_itself_is_passed_on() -> None:
    async with watched() as (_, watch, _client):
        for error in (TimeoutError("own"), KeyError("own"), asyncio.CancelledError()):
            with pytest.raises(type(error)) as raised:
                async with watch.guard():
                    raise error
            assert raised.value is error


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.long
async def test_an_environment_server_that_is_stopped_is_a_fault_and_is_used_again() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    (task,) = build_tasks("shop", {"count": 1})
    with service(
        "-m", "toolrl.envs.openenv.server", "--env", "shop", "--port", str(port), url=f"{url}/health"
    ) as process:
        pid = process.pid
        remote = RemoteFactory(url, timeout_s=300.0, health_timeout_s=PROCESS_S)
        env = remote(task)
        await env.reset()
        with stopped(pid):
            with pytest.raises(ServiceDownError, match=f"environment server {url}: {url}/health has not answered"):
                await env.step(respond())
            await env.close()  # at once, with a warning
            with pytest.raises(ServiceDownError, match="has not answered"):
                await remote(task).reset()
        for _ in range(1000):
            try:
                assert (await remote(task).reset()).messages
                break
            except ServiceDownError:
                await asyncio.sleep(0.05)
        else:
            raise AssertionError("it is not used again")
        await remote.close()


@pytest.mark.long
async def test_a_sandbox_server_that_is_stopped_is_passed_over() -> None:
    ports = [free_port(), free_port()]
    urls = [f"http://127.0.0.1:{port}" for port in ports]

    def command(port: int) -> list[str]:
        return ["-m", "toolrl.sandbox.server", "--isolation", "none", "--workers", "1", "--port", str(port)]

    with (
        service(*command(ports[0]), url=f"{urls[0]}/health") as process,
        service(*command(ports[1]), url=f"{urls[1]}/health"),
    ):
        pid = process.pid
        alone = RemoteSandbox(urls[:1], patience_s=PROCESS_S, health_timeout_s=PROCESS_S)
        both = RemoteSandbox(urls, health_timeout_s=PROCESS_S)
        for sandbox in (alone, both):
            assert (await sandbox.run("print(1)")).stdout == "1\n"
        with stopped(pid):
            with pytest.raises(ServiceDownError, match=f"no server works. {urls[0]}: .*/v1/ping has not answered"):
                await alone.run("print(1)")
            done = await asyncio.gather(*(both.run(f"print({number})") for number in range(4)))
            assert [each.stdout for each in done] == [f"{number}\n" for number in range(4)]
        for _ in range(1000):
            try:
                assert (await alone.run("print(2)")).stdout == "2\n"
                break
            except ServiceDownError:
                await asyncio.sleep(0.05)
        else:
            raise AssertionError("it is not used again")
        await alone.close()
        await both.close()


@pytest.mark.long
async def test_a_retriever_that_is_stopped_is_passed_over(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl.gz"
    corpus.write_bytes(gzip.compress(json.dumps({"id": 0, "contents": "Rome"}).encode()))
    ports = [free_port(), free_port()]
    urls = [f"http://127.0.0.1:{port}/retrieve" for port in ports]
    module = ("-m", "toolrl.tools.retrieval.server", "--corpus", str(corpus), "--port")
    with service(*module, str(ports[0]), url=urls[0]) as process, service(*module, str(ports[1]), url=urls[1]):
        pid = process.pid
        both = HttpRetriever(urls, timeout_s=300.0, health_timeout_s=PROCESS_S)
        alone = HttpRetriever(urls[0], timeout_s=300.0, health_timeout_s=PROCESS_S)
        with stopped(pid):
            for _ in range(2):
                assert (await both.search(["rome"], 1))[0][0].contents == "Rome"
            with pytest.raises(ServiceDownError, match=f"{urls[0]} has not answered"):
                await alone.search(["rome"], 1)
        await both.close()
        await alone.close()
