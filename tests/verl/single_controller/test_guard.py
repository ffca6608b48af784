"""The watch over Ray's own processes, on processes that stand for them."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.support.until import until
from verl.single_controller.guard import Guard


@pytest.fixture
def processes() -> Iterator[dict[str, psutil.Process]]:
    started = {name: subprocess.Popen(["sleep", "600"]) for name in ("raylet", "control service of Ray")}
    yield {name: psutil.Process(each.pid) for name, each in started.items()}
    for each in started.values():
        each.kill()
        each.wait()


def wait_for_problem(guard: Guard) -> str:
    until(lambda: guard.problem)
    assert guard.problem is not None
    return guard.problem


@pytest.mark.parametrize("name", ["raylet", "control service of Ray"])
def test_a_dead_process_is_named_and_nothing_waits_for_the_others(
    name: str, processes: dict[str, psutil.Process]
) -> None:
    with Guard(processes, 30.0) as guard:
        assert guard.check() is None
        processes[name].kill()
        assert f"the {name} (process {processes[name].pid}) on this machine died" in wait_for_problem(guard)
        until(lambda: all(each.status() == psutil.STATUS_ZOMBIE for each in processes.values()))


def test_awaited_work_is_cancelled(processes: dict[str, psutil.Process]) -> None:
    async def awaited(guard: Guard) -> None:
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        with guard.cancelling(future):
            processes["raylet"].kill()
            await asyncio.wait_for(future, 60)

    with Guard(processes, 30.0) as guard:
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(awaited(guard))
        with pytest.raises(asyncio.CancelledError):  # after the fact, too
            asyncio.run(awaited(guard))


@pytest.mark.long
def test_a_process_that_is_stopped_for_too_long_is_a_problem(processes: dict[str, psutil.Process]) -> None:
    with Guard(processes, 2.0) as guard:
        processes["raylet"].send_signal(signal.SIGSTOP)
        problem = wait_for_problem(guard)
    assert f"the raylet (process {processes['raylet'].pid})" in problem
    assert "stopped for more than 2 s (trainer.health_timeout_s)" in problem


def test_a_process_that_a_debugger_holds_is_left_alone(processes: dict[str, psutil.Process]) -> None:
    class Held(psutil.Process):  # type: ignore[misc]
        def status(self) -> str:
            return str(psutil.STATUS_TRACING_STOP)

    with Guard({"raylet": Held(processes["raylet"].pid)}, 0.0) as guard:
        time.sleep(0.1)
        assert guard.check() is None


@pytest.mark.long
def test_a_process_that_goes_on_within_its_deadline_costs_nothing(processes: dict[str, psutil.Process]) -> None:
    with Guard(processes, 600.0) as guard:
        for _ in range(2):
            processes["raylet"].send_signal(signal.SIGSTOP)
            time.sleep(1.5)
            assert guard.check() is None
            processes["raylet"].send_signal(signal.SIGCONT)
            time.sleep(0.1)
        assert guard.check() is None
