"""toolrl.sandbox.server and .client: SandboxFusion's protocol there and back, servers that fail and come back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.service import free_port
from tests.toolrl.sandbox.sandbox_host import need_bubblewrap
from toolrl.sandbox.client import RemoteSandbox
from toolrl.sandbox.local import LocalSandbox
from toolrl.sandbox.protocol import CommandRunResult, RunCodeResponse
from toolrl.sandbox.server import MOST_LINES, make_app
from verl.envs.sandbox import Limits, Status
from verl.errors import ConfigError, DataError, ServiceDownError

ROOT = Path(__file__).parents[3]


class ServerProcess:
    """`python -m toolrl.sandbox.server` in a process of its own."""

    def __init__(self, port: int, *options: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "toolrl.sandbox.server", "--port", str(port), "--workers", "1", *options]
        self.process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)

    def wait(self) -> None:
        for _ in range(600):
            assert self.process.poll() is None
            with contextlib.suppress(httpx2.HTTPError):
                if httpx2.get(f"{self.url}/health", timeout=20).json() == {"status": "ok"}:
                    return
            time.sleep(0.05)
        raise AssertionError(f"{self.url} does not come up")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    need_bubblewrap()
    server = ServerProcess(free_port())
    server.wait()
    yield server.url
    server.kill()


def test_the_protocol_as_it_is_on_the_wire(url: str) -> None:
    request = {"code": "print(open('a').read()); open('b', 'w').write('out')", "language": "python"}
    answer = httpx2.post(f"{url}/run_code", json=request | {"files": {"a": "aGk="}, "fetch_files": ["b", "c"]}).json()
    assert 0 < answer["run_result"].pop("execution_time") < 10
    assert answer == {
        "status": "Success",
        "message": "",
        "compile_result": None,
        "run_result": {"status": "Finished", "return_code": 0, "stdout": "hi\n", "stderr": ""},
        "executor_pod_name": None,
        "files": {"b": "b3V0"},
    }
    failed = httpx2.post(f"{url}/run_code", json={"code": "exit 3", "language": "bash"}).json()
    assert (failed["status"], failed["run_result"]["status"], failed["run_result"]["return_code"]) == (
        "Failed",
        "Error",
        3,
    )
    slow = {"code": "print(1)\nwhile True: pass", "language": "python", "run_timeout": 0.5}
    late = httpx2.post(f"{url}/run_code", json=slow).json()
    assert (late["status"], late["run_result"]["status"]) == ("Failed", "TimeLimitExceeded")
    assert (late["run_result"]["return_code"], late["run_result"]["stdout"]) == (None, "1\n")


def test_cells_on_the_wire(url: str) -> None:
    request = {"cells": ["x = 1", "1 / 0", "x + 1"], "files": {"a": "aGk="}, "fetch_files": ["a"]}
    answer = httpx2.post(f"{url}/run_jupyter", json=request).json()
    assert (answer["status"], answer["driver"]["status"]) == ("Success", "Finished")
    assert [cell["stdout"] for cell in answer["cells"]] == ["", "", "2\n"]
    (error,) = answer["cells"][1]["error"]
    assert (error["ename"], error["evalue"]) == ("ZeroDivisionError", "division by zero")
    assert answer["files"] == {"a": "aGk="}
    lines = {"cells": ["import sys; sys.stderr.write('\\n' * 10_000 + 'KeyError: 1'); sys.exit(1)"]}
    (cell,) = httpx2.post(f"{url}/run_jupyter", json=lines).json()["cells"]
    assert cell["stderr"].count("\n") >= 10_000 and (len(cell["error"][0]["traceback"]), cell["error"][0]["ename"]) == (
        MOST_LINES,
        "KeyError",
    )
    late = httpx2.post(f"{url}/run_jupyter", json={"cells": ["1", "while True: pass", "3"], "cell_timeout": 0.5}).json()
    assert (late["status"], late["driver"]["status"], len(late["cells"])) == ("Failed", "TimeLimitExceeded", 2)


@pytest.mark.parametrize(
    "request_",
    [
        {"code": "1", "language": "cobol"},
        {"code": "1", "language": "python", "files": {"../a": ""}},
        {"code": "1", "language": "python", "files": {"a": "no base64!"}},
        {"language": "python"},
    ],
)
def test_an_impossible_request_is_refused(url: str, request_: dict[str, Any]) -> None:
    assert httpx2.post(f"{url}/run_code", json=request_).status_code in (400, 422)


@contextlib.asynccontextmanager
async def remote(*urls: str, **settings: Any) -> AsyncIterator[RemoteSandbox]:
    sandbox = RemoteSandbox(urls, **settings)
    yield sandbox
    await sandbox.close()


@pytest.mark.parametrize(
    ("path", "asked", "status", "message"),
    [
        ("run_code", '"run_timeout": NaN', 422, "run_timeout"),
        ("run_code", '"run_timeout": "nan"', 422, "run_timeout"),
        ("run_code", '"run_timeout": Infinity', 422, "run_timeout"),
        ("run_code", '"compile_timeout": 1e999', 422, "compile_timeout"),
        ("run_code", '"memory_limit_MB": NaN', 422, "memory_limit_MB"),
        ("run_code", '"run_timeout": -1', 400, "more than 0"),
        ("run_code", '"run_timeout": 0', 400, "more than 0"),
        ("run_code", f'"run_timeout": {"9" * 5000}', 400, "the body is not JSON"),
        ("run_code", f'"memory_limit_MB": {"9" * 5000}', 400, "the body is not JSON"),
        ("run_code", f'"fetch_files": {"[" * 200_000}{"]" * 200_000}', 400, "the body is not JSON"),
        ("run_code", '"run_timeout": 1e6', 400, "--max-timeout-s"),
        ("run_code", '"memory_limit_MB": 1000000', 400, "--max-memory-mib"),
        ("run_code", f'"files": {json.dumps({str(number): "" for number in range(2000)})}', 422, "files"),
        ("run_code", f'"fetch_files": {json.dumps(["a"] * 2000)}', 422, "fetch_files"),
        ("run_jupyter", '"cells": ["1"], "total_timeout": NaN', 422, "total_timeout"),
        ("run_jupyter", '"cells": ["1"], "total_timeout": -1', 400, "more than 0"),
        ("run_jupyter", '"cells": ["1"], "cell_timeout": -1', 400, "more than 0"),
        ("run_jupyter", '"cells": ["1"], "total_timeout": 1e6', 400, "--max-timeout-s"),
        ("run_jupyter", f'"cells": {json.dumps(["1"] * 2000)}', 422, "cells"),
    ],
)
async def test_forbidden_requests_are_refused(path: str, asked: str, status: int, message: str) -> None:
    transport = httpx2.ASGITransport(make_app(LocalSandbox(1, "none")))
    body = f'{{"code": "1", "language": "python", {asked}}}'
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status and message in answer.text and len(answer.text) < 10_000


async def test_many_cells_have_the_longest_time_each() -> None:
    sandbox = LocalSandbox(1, "none", preload=())
    transport = httpx2.ASGITransport(make_app(sandbox, Limits(wall_s=10.0)))
    asked = {"cells": ["x = 1", "print(x)"], "cell_timeout": 10, "total_timeout": 20}
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.post("run_jupyter", json=asked, timeout=60)
    await sandbox.close()
    assert answer.json()["cells"][1]["stdout"] == "1\n"


@pytest.mark.long
def test_a_client_that_hangs_up_leaves_its_worker_to_others() -> None:
    server = ServerProcess(free_port(), "--isolation", "none")
    long = {"code": "import time; time.sleep(250)", "language": "python", "run_timeout": 280}
    try:
        server.wait()
        for path, asked in (("run_code", long), ("run_jupyter", {"cells": [long["code"]], "total_timeout": 280})):
            with pytest.raises(httpx2.ReadTimeout):
                httpx2.post(f"{server.url}/{path}", json=asked, timeout=1)
            quick = {"code": "print(1)", "language": "python"}
            answer = httpx2.post(f"{server.url}/run_code", json=quick, timeout=60)  # there is one worker
            assert answer.json()["run_result"]["stdout"] == "1\n"
    finally:
        server.kill()


@pytest.mark.slow
def test_a_thousand_requests_at_once_have_a_thousand_right_answers() -> None:
    server = ServerProcess(free_port(), "--isolation", "none")

    async def ask_all() -> list[str]:
        limits = httpx2.Limits(max_connections=1000)
        async with httpx2.AsyncClient(base_url=server.url, timeout=500, limits=limits, trust_env=False) as client:
            asked = [{"code": f"print({number})", "language": "python"} for number in range(1000)]
            answers = await asyncio.gather(*(client.post("/run_code", json=each) for each in asked))
            return [answer.json()["run_result"]["stdout"] for answer in answers]

    try:
        server.wait()
        assert asyncio.run(ask_all()) == [f"{number}\n" for number in range(1000)]
    finally:
        server.kill()


async def test_files_that_are_too_large_are_the_codes_own_fault(url: str) -> None:
    async with remote(url) as sandbox:
        done = await sandbox.run("1", files={"a": bytes(40 << 20)})
        assert (done.status, done.return_code) == (Status.ERROR, None) and "more than 32 MiB" in done.stderr
        assert (await sandbox.run("print(1)")).stdout == "1\n"


async def test_round_trip(url: str) -> None:
    async with remote(url + "/") as sandbox:
        done = await sandbox.run("cat a; echo err >&2; cat; echo z > z", "bash", "in\n", {"a": b"A"}, ["z"])
        assert (done.status, done.return_code, done.stdout, done.stderr) == (Status.FINISHED, 0, "Ain\n", "err\n")
        assert done.files == {"z": b"z\n"}
        late = await sandbox.run("while True: pass", limits=Limits(wall_s=0.3))
        assert (late.status, late.return_code) == (Status.TIMEOUT, None)
        large = await sandbox.run("bytearray(1 << 28)", limits=Limits(memory_mib=100))
        assert "MemoryError" in large.stderr
        with pytest.raises(DataError, match="language 'cobol'"):
            await sandbox.run("1", "cobol")


async def test_a_remote_session(url: str) -> None:
    async with remote(url) as sandbox:
        session = await sandbox.session()
        assert (await session.run("x = 1; print('once')")).stdout == "once\n"
        failed = await session.run("x += 1\n1 / 0")
        assert (failed.status, failed.return_code) == (Status.ERROR, 1)
        assert failed.stderr.endswith("ZeroDivisionError: division by zero\n")
        assert (await session.run("x")).stdout == "2\n"
        late = await session.run("while True: pass", Limits(wall_s=0.5))
        assert (late.status, late.return_code) == (Status.TIMEOUT, None)
        assert "NameError" in (await session.run("x")).stderr
        await session.close()


class Scripted:
    """A server in this loop that counts its requests and fails on request."""

    def __init__(self) -> None:
        self.reserved = socket.socket()  # bound but without connections: no other process gets the port meanwhile
        self.reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self.reserved.bind(("127.0.0.1", 0))
        self.port = self.reserved.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.requests: Counter[str] = Counter()
        self.broken = False
        self.delay_s = 0.0
        self.under_way = self.most_under_way = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = next(
                    (int(line.split(":")[1]) for line in head.splitlines() if line.startswith("content-length")), 0
                )
                await reader.readexactly(length)
                path = head.split()[1]
                self.requests[path] += 1
                self.under_way += 1
                self.most_under_way = max(self.most_under_way, self.under_way)
                await asyncio.sleep(self.delay_s)
                self.under_way -= 1
                result = CommandRunResult(status="Finished", return_code=0, stdout=self.url, stderr="")
                answer = RunCodeResponse(status="Success", run_result=result)
                if self.broken:
                    answer = RunCodeResponse(status="SandboxError", message="out of disk")
                body = answer.model_dump_json().encode()
                code = b"503 no" if self.broken and path == "/health" else b"200 OK"
                writer.write(b"HTTP/1.1 " + code + b"\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        writer.close()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self.serve, "127.0.0.1", self.port, reuse_port=True)
        yield
        server.close()


async def run_many(sandbox: RemoteSandbox, count: int) -> Counter[str]:
    done = await asyncio.gather(*[sandbox.run("1") for _ in range(count)])
    return Counter(each.stdout for each in done)


async def test_load_is_balanced_and_limited() -> None:
    first, second = Scripted(), Scripted()
    first.delay_s = second.delay_s = 0.05
    async with first.running(), second.running(), remote(first.url, second.url, max_requests=4) as sandbox:
        counts = await run_many(sandbox, 20)
        assert sum(counts.values()) == 20
        assert min(counts.values()) >= 8
        assert first.most_under_way + second.most_under_way <= 4


@pytest.mark.long
async def test_a_failing_server_is_paused_and_used_again() -> None:
    good, bad = Scripted(), Scripted()
    bad.broken = True
    async with good.running(), bad.running(), remote(good.url, bad.url) as sandbox:
        assert await run_many(sandbox, 10) == {good.url: 10}
        assert bad.requests["/run_code"] <= 10
        asked = bad.requests["/run_code"]
        assert await run_many(sandbox, 10) == {good.url: 10}
        await asyncio.sleep(1.0)
        assert await run_many(sandbox, 4) == {good.url: 4}
        assert bad.requests["/run_code"] == asked  # only asked for its health
        bad.broken = False
        for _ in range(200):
            if (await run_many(sandbox, 2))[bad.url]:
                return
            await asyncio.sleep(0.05)
        raise AssertionError("it never came back")


async def test_no_server_at_all_names_each(caplog: pytest.LogCaptureFixture) -> None:
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    with pytest.raises(ServiceDownError) as raised:
        async with remote(*urls, patience_s=0.5) as sandbox:
            await sandbox.run("1")
    assert all(each in str(raised.value) for each in urls)
    assert "ConnectError" in str(raised.value)
    with pytest.raises(ConfigError, match=r"sandbox\.urls is empty"):
        RemoteSandbox([])


async def test_requests_wait_for_a_server_that_comes_up_late() -> None:
    server = Scripted()
    async with remote(server.url, patience_s=20.0) as sandbox:
        task = asyncio.create_task(sandbox.run("1"))
        await asyncio.sleep(0.5)
        async with server.running():
            assert (await task).stdout == server.url


@pytest.mark.long
def test_one_of_three_servers_is_killed_while_they_work() -> None:
    servers = [ServerProcess(free_port(), "--isolation", "none") for _ in range(3)]

    async def work() -> list[str]:
        async with remote(*[server.url for server in servers]) as sandbox:
            tasks = [asyncio.create_task(sandbox.run(f"import time; time.sleep(0.1); print({i})")) for i in range(30)]
            await asyncio.sleep(0.5)
            servers[1].kill()
            return [(await task).stdout for task in tasks]

    try:
        for server in servers:
            server.wait()
        assert asyncio.run(work()) == [f"{i}\n" for i in range(30)]
    finally:
        for server in servers:
            server.kill()


def test_without_bubblewrap_the_server_prints_a_hint() -> None:
    command = [sys.executable, "-m", "toolrl.sandbox.server", "--port", str(free_port())]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PATH": "/nowhere"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "error: sandbox.isolation=bubblewrap: `bwrap` not found. apt-get install bubblewrap" in done.stderr
