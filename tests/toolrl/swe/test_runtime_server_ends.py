"""Cruelties to runtime servers: clients that vanish, kill -9, a full disk. Nothing is left, and nothing scores 0."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import psutil
import pytest

from tests.support.programs import need
from tests.toolrl.sandbox.sandbox_host import need_bubblewrap
from tests.toolrl.swe.repositories import calc_task, run
from tests.toolrl.swe.test_swe_remote import ROOT, TOKEN, runtime_server
from toolrl.swe import wire
from toolrl.swe.remote import RemoteRuntimes
from toolrl.swe.runtime import RuntimeLostError

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    need_bubblewrap()
    monkeypatch.setenv("VERL_SERVICE_TOKEN", TOKEN)


def names(server: psutil.Process) -> set[str]:
    return {each.name() for each in server.children(recursive=True)}


def test_a_client_that_vanishes_in_a_command_or_an_upload_and_a_lost_runtime_leave_no_lease(tmp_path: Path) -> None:
    async def main(url: str, server: psutil.Process) -> None:
        pool = RemoteRuntimes([url], tmp_path / "store")
        async with httpx2.AsyncClient(base_url=url, headers=pool.client.headers, trust_env=False) as client:

            async def leases(number: int) -> bool:
                return bool((await client.get("/health")).json() == {"leases": number})

            command = '{"command": "sleep 900", "timeout": 900}'
            for begin, length, sent in (
                ("POST /run_in_session", len(command), command),
                ("POST /upload", 300_000_000, "x" * 3_000_000),
                (f"PUT /image/{'a' * 40}", 300_000_000, "x" * 3_000_000),
            ):
                runtime = await pool.start(calc_task(tmp_path))
                await runtime.run("true")
                headers = {"Host": "localhost", wire.API_KEY: TOKEN, **runtime._headers, "Content-Length": length}
                headers["Content-Type"] = "application/json"
                lines = [f"{begin} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", sent]
                _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
                writer.write("\r\n".join(lines).encode())
                await asyncio.sleep(0.5)
                while "run_in" in begin and "sleep" not in names(server):
                    await asyncio.sleep(0.1)
                assert await leases(1)
                writer.transport.abort()
                assert runtime._renewing is not None
                runtime._renewing.cancel()
                deadline = time.monotonic() + 60
                while not await leases(0):
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.2)
            runtime = await pool.start(calc_task(tmp_path))
            sandbox = next(each for each in server.children() if each.name() == "bwrap")
            processes = [sandbox, *sandbox.children(recursive=True)]  # which end one after the other
            sandbox.kill()
            assert psutil.wait_procs(processes, timeout=60)[1] == []
            with pytest.raises(RuntimeLostError):
                await runtime.run("true")
            assert await leases(0)
            await pool.start(calc_task(tmp_path))
            await pool.close()
            assert await leases(0)
        assert [each.name for each in (tmp_path / "server").rglob("episode-*")] == []

    with runtime_server(tmp_path, "--lease-s", "6") as url:
        (process,) = [each for each in psutil.Process().children() if str(tmp_path / "server") in each.cmdline()]
        run(main(url, process))
        assert process.children() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_is_stopped_leaves_nothing_or_the_next_one_removes_it(tmp_path: Path, number: int) -> None:
    async def main(url: str, server: psutil.Process) -> None:
        pool = RemoteRuntimes([url], tmp_path / "store")
        for _ in range(2):
            await (await pool.start(calc_task(tmp_path))).run("(setsid sleep 4711 &); echo x > /tmp/file")
        started = server.children(recursive=True)
        server.send_signal(number)
        assert started and psutil.wait_procs(started, timeout=30)[1] == []
        server.wait(30)
        await pool.close()

    async def again(url: str) -> None:
        pool = RemoteRuntimes([url], tmp_path / "store")
        await (await pool.start(calc_task(tmp_path))).close()
        await pool.close()

    folder = tmp_path / "server"
    with runtime_server(tmp_path) as url:
        (process,) = [each for each in psutil.Process().children() if str(folder) in each.cmdline()]
        run(main(url, process))
    assert len(list(folder.glob("verl-runtimes-*/episode-*"))) == (2 if number == signal.SIGKILL else 0)
    if number == signal.SIGTERM:
        assert [each.name for each in folder.iterdir()] == ["images"]
    with runtime_server(tmp_path) as url:
        run(again(url))
    assert [each.name for each in folder.iterdir()] == ["images"]
    assert str(folder) not in Path("/proc/self/mountinfo").read_text()
    assert list(Path("/sys/fs/cgroup").rglob(f"verl-sandbox-{process.pid}-*")) == []


FULL = """
import asyncio, sys
from pathlib import Path
from tests.toolrl.swe.repositories import GOLD, calc_task
from toolrl.swe.local import LocalRuntimes
from toolrl.swe.runtime import RuntimeLimits, RuntimeLostError
from toolrl.swe.scoring import score_patch

async def main(folder):
    runtimes = LocalRuntimes(folder / "disk")
    task = calc_task(folder, limits=RuntimeLimits(file_mib=500))
    runtime = await runtimes.start(task)
    for asked in (runtime.run("head -c 190M /dev/zero > /tmp/f; sleep 9"), score_patch(runtimes, task, GOLD)):
        try:
            print(await asked)
        except RuntimeLostError as error:
            print("LOST", error)
    await runtime.close()
    runtime = await runtimes.start(task)
    print((await runtime.run("echo room again")).output)
    await runtimes.close()

asyncio.run(main(Path(sys.argv[1])))
"""


def test_on_a_full_disk_runtimes_are_lost_and_nothing_scores_zero(tmp_path: Path) -> None:
    need("unshare", "mount")
    (tmp_path / "disk").mkdir()
    (tmp_path / "full.py").write_text(FULL)
    script = f"mount -t tmpfs -o size=200m none {tmp_path}/disk && exec {sys.executable} {tmp_path}/full.py {tmp_path}"
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
    if "permi" in done.stderr:
        pytest.skip("only root can mount a small disk")
    assert done.stdout.splitlines()[2:] == ["room again", ""], done.stdout + done.stderr
    lost = done.stdout.splitlines()[:2]
    assert all(line.startswith("LOST runtime:") for line in lost) and "the disk of its files is full" in lost[0]
