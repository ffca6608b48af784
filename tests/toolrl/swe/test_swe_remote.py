"""Runtimes over HTTP: our client and server, each with the other side of SWE-ReX, unchanged."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.answering import answering
from tests.support.foreign import foreign_python
from tests.support.proxy import FAULTS, MODES, Proxy, behind
from tests.support.service import free_port
from tests.toolrl.sandbox.sandbox_host import need_bubblewrap
from tests.toolrl.swe.repositories import FILES, calc_task, patch, pytest_environment, run
from toolrl.servers.endpoints import Endpoint
from toolrl.servers.health import HealthWatch
from toolrl.swe import remote, wire
from toolrl.swe.image import prepare_image
from toolrl.swe.remote import RemoteRuntime, RemoteRuntimes
from toolrl.swe.runtime import CommandFailedError, CommandStatus, Runtime, RuntimeLimits, RuntimeLostError
from toolrl.swe.scoring import PatchOutcome, collect_patch, score_patch
from toolrl.swe.tasks import SweTask
from verl.envs.clock import EnvTimer
from verl.errors import ConfigError, DataError, ServiceDownError

ROOT = Path(__file__).parents[3]
TOKEN = "token-4711"
SWEREX_CLIENT = """
import asyncio, sys
from pathlib import Path
from swerex.deployment.remote import RemoteDeployment
from swerex.exceptions import *
from swerex.runtime.abstract import *

async def main(port, folder):
    deployment = RemoteDeployment(auth_token="token-4711", host="http://127.0.0.1", port=int(port), timeout=30)
    await deployment.start()
    runtime = deployment.runtime
    assert await runtime.is_alive()
    await runtime.create_session(CreateBashSessionRequest())
    act = lambda command, **more: runtime.run_in_session(BashAction(command=command, **more))
    await act("cd /tmp && x=7")
    done = await act("echo $x; pwd")
    assert (done.output, done.exit_code) == ("7\\n/tmp\\n", 0), done
    try:
        await act("false")
        raise SystemExit("no NonZeroExitCodeError")
    except NonZeroExitCodeError:
        pass
    assert (await act("(exit 3)", check="silent")).exit_code == 3
    try:
        await act("sleep 60", timeout=0.5)
        raise SystemExit("no CommandTimeoutError")
    except CommandTimeoutError:
        pass
    await runtime.run_in_session(BashInterruptAction(timeout=1))
    waiting = asyncio.create_task(act("touch /tmp/began; sleep 60", check="silent", timeout=30))
    while (await runtime.execute(Command(command=["test", "-e", "/tmp/began"]))).exit_code:
        await asyncio.sleep(0.1)
    await runtime.run_in_session(BashInterruptAction(timeout=1))
    assert (await waiting).exit_code == 130
    assert (await act("echo $x")).output == "7\\n"
    for wrong, error in ((CreateBashSessionRequest(), SessionExistsError),):
        try:
            await runtime.create_session(wrong)
            raise SystemExit("no SessionExistsError")
        except error:
            pass
    try:
        await act("true", session="absent")
        raise SystemExit("no SessionDoesNotExistError")
    except SessionDoesNotExistError:
        pass
    await runtime.write_file(WriteFileRequest(path="/tmp/a/b.txt", content="text"))
    assert (await runtime.read_file(ReadFileRequest(path="/tmp/a/b.txt"))).content == "text"
    source = Path(folder)
    (source / "sub").mkdir()
    (source / "sub" / "data.bin").write_bytes(bytes(range(256)))
    await runtime.upload(UploadRequest(source_path=str(source), target_path="/tmp/up"))
    await runtime.upload(UploadRequest(source_path=str(source / "sub" / "data.bin"), target_path="/tmp/one.bin"))
    done = await runtime.execute(Command(command=["sha1sum", "/tmp/up/sub/data.bin", "/tmp/one.bin"]))
    assert done.stdout.count("4916d6bdb7f78e6803698cab32d1586ea457dfc8") == 2, done
    try:
        await runtime.read_file(ReadFileRequest(path="/tmp/one.bin"))
        raise SystemExit("no ValueError")
    except ValueError as error:
        assert "/tmp/one.bin" in str(error), error
    assert (await runtime.read_file(ReadFileRequest(path="/tmp/a/b.txt"))).content == "text"
    done = await runtime.execute(Command(command="echo out; echo err >&2; exit 4", shell=True))
    assert (done.stdout, done.stderr, done.exit_code) == ("out\\n", "err\\n", 4)
    await runtime.close_session(CloseBashSessionRequest())
    await deployment.stop()
    print("ALL GOOD")

asyncio.run(main(*sys.argv[1:]))
"""


@contextlib.contextmanager
def serving(command: list[str], port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server, until the end of the block; waits until it answers."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VERL_SERVICE_TOKEN": TOKEN}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + 90
        request = urllib.request.Request(f"http://127.0.0.1:{port}/is_alive", headers={"X-API-Key": TOKEN})
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(request, timeout=2).read()
                break
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


@contextlib.contextmanager
def runtime_server(folder: Path, *options: str) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "toolrl.swe.server", "--port", str(port), "--folder", str(folder / "server")]
    with serving([*command, *options], port, folder / "server.log"):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    need_bubblewrap()
    monkeypatch.setenv("VERL_SERVICE_TOKEN", TOKEN)


def swerex() -> str:
    """The interpreter of an environment with SWE-ReX, or a skip."""
    return str(foreign_python(ROOT / "scripts" / "swe" / "swerex.txt"))


@pytest.mark.long
def test_a_task_on_a_server_of_ours_has_the_same_verdicts(tmp_path: Path) -> None:
    environment = pytest_environment(tmp_path / "environments")

    async def main(url: str) -> None:
        pool = RemoteRuntimes([url], store=tmp_path / "store")
        task = calc_task(tmp_path, environment)
        table = "," * 2_100_000  # more values than a body may have as JSON
        (tmp_path / "calc" / "table.csv").write_text(table)
        runtime = await pool.start(task)
        assert (await runtime.run("cd calc; x=7; pwd")).output == "/testbed/calc\n"
        late = await runtime.run("sleep 60", timeout_s=0.5)
        assert (late.status, late.exit_code) == (CommandStatus.TIMEOUT, None)
        soft = await runtime.run("sleep 30; echo not", soft_timeout_s=0.3)
        assert soft.status is CommandStatus.RUNNING
        assert (await runtime.interrupt()).exit_code == 130
        assert (await runtime.run("echo $x; (exit 3)")).output == "7\n"
        data = bytes(range(256)) * 500 + table.encode()
        await runtime.write("/testbed/data.bin", data)
        assert await runtime.read("/testbed/data.bin") == data
        with pytest.raises(CommandFailedError, match="No such file"):
            await runtime.read("/absent")
        name = await runtime.snapshot()
        await runtime.run("rm -r calc data.bin")
        await runtime.restore(name)
        await runtime.upload(tmp_path / "calc" / "calc", "/testbed/copy")
        await runtime.download("/testbed/copy", tmp_path / "down")
        assert (tmp_path / "down" / "core.py").read_text() == FILES["calc/core.py"]
        await runtime.run("rm -r copy data.bin; sed -i 's/a - b/a + b/' calc/core.py")
        made = await collect_patch(runtime, task)
        await runtime.close()
        assert "+    return a + b" in made
        assert (await score_patch(pool, task, made)).outcome is PatchOutcome.RESOLVED
        assert (await score_patch(pool, task, patch({"README.md": "x\n"}))).outcome is PatchOutcome.UNRESOLVED
        with pytest.raises(DataError, match="no environment 'absent'"):
            await pool.start(replace(task, environment="/x/absent"))
        Path(environment).with_name("empty").mkdir()
        with pytest.raises(DataError, match="is not a virtual environment"):
            await pool.start(replace(task, environment="/x/empty"))
        with pytest.raises(RuntimeLostError, match="setup"):
            await pool.start(replace(task, setup="false"))
        await pool.close()

    options = ("--environments", str(Path(environment).parent), "--lease-s", "20")
    with runtime_server(tmp_path, *options) as url:
        run(main(url), 300)


@pytest.mark.long
def test_leases_bound_the_runtimes_and_end_with_their_clients(tmp_path: Path) -> None:
    async def main(url: str) -> None:
        pool = RemoteRuntimes([url], store=tmp_path / "store", patience_s=60)
        task = calc_task(tmp_path)
        first = await pool.start(task)
        second = asyncio.create_task(pool.start(task))  # queued
        await asyncio.sleep(1)
        assert not second.done()
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with httpx2.AsyncClient(base_url=url, headers=headers, trust_env=False) as client:
            body = {"image": (await pool._image(task)).name}
            assert (await client.post("/lease", json=body)).status_code == wire.FULL  # the queue is full, too
            assert (await client.post("/lease", json=body, headers={"Authorization": "x"})).status_code == 401
            await first.run("true")
            once = {wire.LEASE: first._headers[wire.LEASE], wire.REQUEST_ID: "one"}
            action = {"command": "echo again >> /tmp/count; cat /tmp/count"}
            for _ in range(3):  # one execution, however often it is asked for
                answer = await client.post("/run_in_session", json=action, headers=once)
                assert answer.json()["output"] == "again\n"
            await asyncio.sleep(8)  # renewed by the client
            assert (await first.run("echo alive")).output == "alive\n"
            first._renewing.cancel()  # as if the client had vanished
            runtime = await second
            with pytest.raises(RuntimeLostError, match="not renewed"):
                await first.run("true")
            assert (await client.get("/health")).json() == {"leases": 1}
            await runtime.close()
            assert (await client.get("/health")).json() == {"leases": 0}
        await pool.close()
        assert not list((tmp_path / "server").rglob("episode-*"))

    with runtime_server(tmp_path, "--capacity", "1", "--queue", "1", "--lease-s", "6") as url:
        run(main(url))


@pytest.mark.long
def test_a_lease_whose_answer_was_lost_is_asked_for_again_and_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second runtime would wait for the first one, which is idle."""

    async def main(url: str) -> None:
        pool, task = RemoteRuntimes([url], store=tmp_path / "store"), calc_task(tmp_path)
        await (await pool.start(task)).close()  # the image is there
        post, lost = pool.client.post, [f"{url}/lease"] * 2

        async def losing(asked: str, **fields: Any) -> httpx2.Response:
            answer = await post(asked, **fields)
            if asked in lost:
                lost.remove(asked)
                raise httpx2.ReadError("the connection broke")
            return answer

        monkeypatch.setattr(pool.client, "post", losing)
        runtime = await pool.start(task)
        assert not lost and (await pool.client.get(f"{url}/health")).json() == {"leases": 1}
        body = {"image": (await pool._image(task)).name, "lease": "a" * 32}
        asked = [asyncio.create_task(post(f"{url}/lease", json=body)) for _ in range(3)]
        await asyncio.sleep(0.5)  # they wait in the queue, as one
        await runtime.close()
        assert [answer.json()["lease"] for answer in await asyncio.gather(*asked)] == ["a" * 32] * 3
        assert (await pool.client.get(f"{url}/health")).json() == {"leases": 1}
        assert (await post(f"{url}/lease", json={**body, "lease": "shared"})).status_code == wire.REFUSED
        await pool.close()

    with runtime_server(tmp_path, "--capacity", "1", "--queue", "1", "--lease-s", "600") as url:
        run(main(url))


@pytest.mark.long
def test_waiting_for_a_runtime_is_not_charged_and_ends_with_a_hint(tmp_path: Path) -> None:
    async def main(url: str) -> None:
        task = calc_task(tmp_path)
        pool, short = (RemoteRuntimes([url], tmp_path / "store", patience_s=seconds) for seconds in (60, 3))
        first = await pool.start(task)
        clock = EnvTimer(60.0)

        async def timed() -> Runtime:
            async with clock.running():
                return await pool.start(task)

        second = asyncio.create_task(timed())
        await asyncio.sleep(1)  # it is queued, and no other may wait
        with pytest.raises(RuntimeLostError, match=r"within 3 s.*\"all runtimes are in use.*max_running"):
            await short.start(task)
        assert not second.done()
        await first.close()
        runtime = await second
        assert clock.seconds < 4  # the second that it slept, and three of the other's patience
        with pytest.raises(RuntimeLostError, match=r"within 3 s.*: all of its runtimes are in use"):
            await short.start(task)
        assert short.endpoints[0].failures == 0
        await runtime.close()
        await (await short.start(task)).close()
        await pool.close()
        await short.close()

    with runtime_server(tmp_path, "--capacity", "1", "--queue", "1") as url:
        run(main(url))


@pytest.mark.long
def test_a_repository_is_made_and_sent_once_and_one_that_is_too_large_is_not_tried_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(url: str) -> None:
        pool = RemoteRuntimes([url, url], tmp_path / "store")
        sent, prepared, put = [], [], pool._put_image

        async def counted(server: Endpoint, image: Path, most_mib: int) -> None:
            sent.append(server.url)
            await put(server, image, most_mib)

        pool._put_image = counted  # type: ignore[method-assign]
        task = calc_task(tmp_path)
        monkeypatch.setattr(remote, "prepare_image", lambda *given: prepared.append(1) or prepare_image(*given))
        for runtime in await asyncio.gather(*(pool.start(task) for _ in range(4))):
            with pytest.raises(DataError, match=r"too large for.*more than 1 MiB; --max-body-mib"):
                await runtime.write("/tmp/file", bytes(50 << 20))
            await runtime.close()
        assert len(sent) == len(prepared) == 1
        large = calc_task(tmp_path / "large")
        (tmp_path / "large" / "calc" / "data.bin").write_bytes(os.urandom(2 << 20))
        with pytest.raises(DataError, match=r"too large for.*: 4\.\d MiB; it accepts 1 MiB.*--max-body-mib"):
            await pool.start(large)
        assert len(sent) == 2 and [(each.failures, each.in_flight) for each in pool.endpoints] == [(0, 0)] * 2
        await pool.close()

    with runtime_server(tmp_path, "--max-body-mib", "1") as url:
        run(main(url))


@pytest.mark.long
def test_repositories_without_a_runtime_make_room_for_others_and_are_sent_again(tmp_path: Path) -> None:
    async def main(url: str) -> None:
        pool = RemoteRuntimes([url], tmp_path / "store")
        tasks = [calc_task(tmp_path / name) for name in "abc"]
        for task in tasks:
            assert task.repository is not None
            (Path(task.repository.path) / "README.md").write_text(task.repository.path)
        names = [(await pool._image(task)).name for task in tasks]

        def kept() -> list[str]:
            return [name for name in names if (tmp_path / "server" / "images" / name).exists()]

        first, second = await pool.start(tasks[0]), await pool.start(tasks[1])
        assert kept() == names[:2]  # both are used
        await second.close()
        third = await pool.start(tasks[2])
        assert kept() == [names[0], names[2]]
        assert (await first.run("cat README.md; git status --short")).output == tasks[0].repository.path
        await first.close()
        again = await pool.start(tasks[1])
        assert (await again.run("cat README.md")).output == tasks[1].repository.path
        assert kept() == names[1:]
        await third.close()
        await pool.close()

    with runtime_server(tmp_path, "--max-images-gib", "1e-6") as url:
        run(main(url))


@pytest.mark.long
def test_a_start_that_fails_on_a_server_is_tried_on_another(tmp_path: Path) -> None:
    """The setup passes on the second server alone; a setup that fails on both is a lost runtime."""

    async def main(urls: list[str]) -> None:
        pool = RemoteRuntimes(urls, store=tmp_path / "store")
        task = calc_task(tmp_path, str(tmp_path / "good/python"), setup="test -e /environment/marker")
        for _ in range(2):
            runtime = await pool.start(task)
            assert runtime._server.url == urls[1]
            await runtime.close()
        with pytest.raises(RuntimeLostError, match="the setup of"):
            await pool.start(replace(task, setup="false"))
        assert [each.in_flight for each in pool.endpoints] == [0, 0]
        await pool.close()

    with contextlib.ExitStack() as stack:
        urls = []
        for name in ("bad", "good"):
            environment = pytest_environment(tmp_path / name)
            Path(environment).rename(tmp_path / name / "python")
            if name == "good":
                (tmp_path / name / "python/marker").touch()
            options = ("--environments", str(tmp_path / name))
            urls.append(stack.enter_context(runtime_server(tmp_path / name, *options)))
        run(main(urls), 300)


def test_a_missing_server_is_a_lost_runtime(tmp_path: Path) -> None:
    async def main() -> None:
        pool = RemoteRuntimes([f"http://127.0.0.1:{free_port()}"], store=tmp_path, patience_s=2, health_timeout_s=2)
        with pytest.raises(RuntimeLostError, match=r"none started within 2 s.*ConnectError"):
            await pool.start(calc_task(tmp_path))
        with pytest.raises(DataError, match=r"has no repository.*deployment"):
            await pool.start(SweTask("t", "", ("a::b",), image="x"))
        await pool.close()

    run(main())
    with pytest.raises(ConfigError):
        run(make_empty())


async def test_a_wrong_token_is_a_lost_runtime_at_once_if_no_server_takes_it(tmp_path: Path) -> None:
    asked: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(request.url.host)
        return httpx2.Response(401, text="expected another token")

    pool = RemoteRuntimes(["http://a", "http://b"], store=tmp_path, patience_s=20)
    await pool.client.aclose()
    pool.client = httpx2.AsyncClient(transport=httpx2.MockTransport(answer))
    problem = r"http://[ab] answered 401: expected another token; set \$VERL_SERVICE_TOKEN"
    with pytest.raises(RuntimeLostError, match=problem):
        await pool.start(calc_task(tmp_path))
    assert sorted(asked) == ["a", "b"]  # each once
    assert [each.in_flight for each in pool.endpoints] == [0, 0]
    await pool.close()


async def test_a_busy_server_is_asked_again_until_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither costs the policy time; a server that has no end of it is a lost runtime."""
    monkeypatch.setattr(remote, "FULL_S", 0.3)
    answers = [429, 429, 200]

    def answer(_: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(answers.pop(0) if len(answers) > 1 else answers[0], json={"detail": "too many"})

    clock = EnvTimer(0.4)
    async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer)) as client:
        server = Endpoint("a", "http://a", HealthWatch("a", "http://a", 30, client))
        runtime = remote.RemoteRuntime(client, server, RuntimeLimits(), None)
        async with clock.running():
            await runtime._send("close", {}, 1.0)
        assert answers == [200] and clock.seconds < 0.3
        answers[:] = [429]
        monkeypatch.setattr(remote, "PATIENCE_S", 0.5)
        with pytest.raises(RuntimeLostError, match=r"answered 429.*too many"):
            await runtime._send("close", {}, 1.0)
        server.watch.close()


async def make_empty() -> None:
    RemoteRuntimes([])


@pytest.mark.long
def test_swe_rex_own_client_works_with_our_server(tmp_path: Path) -> None:
    python = swerex()
    (tmp_path / "source").mkdir()
    with runtime_server(tmp_path) as url:
        command = [python, "-c", SWEREX_CLIENT, url.rpartition(":")[2], str(tmp_path / "source")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "ALL GOOD" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, b"<html>It works!</html>"),
        (200, b"[1, 2]"),
        (200, b"7"),
        (200, b'{"ok": true}'),  # no empty output
        (200, b'{"output": 3, "exit_code": "x", "stdout": 3, "stderr": 4}'),
        (200, b'{"output": "a", "exit'),
        (200, b"\xff\xfe"),
        (511, b"<html>Network Authentication Required</html>"),  # what the status means elsewhere
        (511, b'{"swerexception": null}'),
        (502, b"<html>Bad Gateway</html>"),
    ],
)
def test_an_answer_of_another_program_is_a_lost_runtime_naming_the_server(status: int, body: bytes) -> None:
    async def main(url: str) -> None:
        lease = wire.Lease(lease="a" * 32, lease_s=3600.0)
        async with httpx2.AsyncClient() as client:
            for ask in ("run", "execute", "snapshot"):
                server = Endpoint(url, url, HealthWatch(url, f"{url}/health", 30.0, client))
                runtime = RemoteRuntime(client, server, RuntimeLimits(), lease)
                runtime._sessions.add("default")
                asked = {
                    "run": lambda each: each.run("true"),
                    "execute": lambda each: each.execute(["true"]),
                    "snapshot": lambda each: each.snapshot(),
                }[ask]
                with pytest.raises(RuntimeLostError, match=url):
                    await asked(runtime)
                with pytest.raises(RuntimeLostError, match=url):  # from then on, at once
                    await runtime.run("true")
                await runtime.close()
                server.watch.close()

    with answering(status, body) as url:
        asyncio.run(main(url))


@pytest.mark.parametrize("status", [wire.NO_IMAGE, 200, 503])
def test_a_pool_names_the_server_that_is_no_runtime_server(status: int, tmp_path: Path) -> None:
    async def main(url: str) -> None:
        pool = RemoteRuntimes([url], store=tmp_path / "store", patience_s=1)
        with pytest.raises(ServiceDownError, match=url):
            await pool.start(calc_task(tmp_path))
        await pool.close()

    with answering(status, b"<html></html>", "text/html") as url:
        asyncio.run(main(url))


@pytest.mark.long
def test_a_network_failure_is_an_error_that_names_the_server_in_time(tmp_path: Path) -> None:
    """In the middle of an episode, and at its start; a network that comes back serves the next one."""

    async def main(network: Proxy) -> None:
        task = calc_task(tmp_path)
        for mode in MODES:
            network.mode = "pass"
            pool, short = (
                RemoteRuntimes([network.url], store=tmp_path / "store", patience_s=seconds, health_timeout_s=health_s)
                for seconds, health_s in ((60, 3), (5, 1))
            )
            runtime = await pool.start(task)
            network.mode, began = mode, time.monotonic()
            if mode not in FAULTS:
                assert (await runtime.run("echo seen")).output == "seen\n"
            else:
                with pytest.raises(RuntimeLostError, match=network.url):
                    await runtime.run("echo seen")
            if mode in ("refuse", "stall"):
                with pytest.raises(RuntimeLostError, match=f"none started within 5 s. {network.url}: [^a]"):
                    await short.start(task)
            assert time.monotonic() - began < 30
            network.mode = "pass"
            await runtime.close()
            await short.close()
            await pool.close()

    with runtime_server(tmp_path, "--lease-s", "20", "--capacity", "8") as url, behind(url) as network:
        run(main(network))
