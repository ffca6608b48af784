"""Processes of the sandbox that were stopped or killed are noticed, named in the log, and made anew."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Awaitable, Callable

import psutil
import pytest

from tests.toolrl.sandbox.sandbox_host import need_bubblewrap
from toolrl.sandbox.local import GRACE_S, LocalSandbox
from verl.envs.sandbox import Limits, Status
from verl.errors import ServiceDownError

NOTICED_S = 30.0


def tree() -> dict[str, psutil.Process]:
    """Our sandbox's processes: bwrap (the outer one), the fork server, a supervisor that is idle."""
    (outer,) = [each for each in psutil.Process().children() if each.name() == "bwrap"]
    (inner,) = outer.children()
    (fork_server,) = inner.children()
    return {"bwrap": outer, "fork server": fork_server, "supervisor": fork_server.children()[-1]}


async def in_sandbox(test: Callable[[LocalSandbox], Awaitable[None]]) -> None:
    sandbox = LocalSandbox(workers=1, preload=())
    try:
        assert (await sandbox.run("print(1)")).stdout == "1\n"
        await test(sandbox)
    finally:
        await sandbox.close()


def test_heartbeats_are_due_soon_enough() -> None:
    assert GRACE_S < NOTICED_S


@pytest.mark.long
@pytest.mark.parametrize("who", ["bwrap", "fork server", "supervisor"])
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM])
def test_an_idle_process_that_is_lost(
    who: str, number: signal.Signals, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    need_bubblewrap()
    monkeypatch.setattr("toolrl.sandbox.local.GRACE_S", 3.0)

    async def lose(sandbox: LocalSandbox) -> None:
        tree()[who].send_signal(number)
        await asyncio.sleep(0.2)
        started = time.monotonic()
        for _ in range(3):  # the fork server that was stopped could have a supervisor left
            assert (await sandbox.run("print(1)", fetch=["a"])).stdout == "1\n"
        assert time.monotonic() - started < NOTICED_S

    asyncio.run(in_sandbox(lose))
    if number == signal.SIGSTOP and who != "bwrap":
        assert re.search(r"sandbox fork server \d+: no heartbeat .*stopped: python\S* \d+", caplog.text)


@pytest.mark.long
def test_a_supervisor_that_is_stopped_while_code_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    need_bubblewrap()
    monkeypatch.setattr("toolrl.sandbox.local.GRACE_S", 3.0)

    async def stop(sandbox: LocalSandbox) -> None:
        session = await sandbox.session()
        await session.run("x = 1")
        waits = asyncio.create_task(session.run("import time; time.sleep(600)", Limits(wall_s=600)))
        await asyncio.sleep(0.5)
        for process in tree()["fork server"].children():
            process.suspend()
        started = time.monotonic()
        with pytest.raises(ServiceDownError, match="a session's supervisor exited without an answer"):
            await waits
        assert time.monotonic() - started < NOTICED_S
        assert (await session.run("2")).stdout == "2\n"

    asyncio.run(in_sandbox(stop))
    assert "no heartbeat" in caplog.text


@pytest.mark.long
def test_a_long_execution_is_not_taken_for_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    need_bubblewrap()
    monkeypatch.setattr("toolrl.sandbox.local.GRACE_S", 6.0)

    async def wait(sandbox: LocalSandbox) -> None:
        assert (await sandbox.run("import time; time.sleep(8)", limits=Limits(wall_s=60))).status is Status.FINISHED

    asyncio.run(in_sandbox(wait))
