"""A run without progress ends, and names the place where it waits: in the event loop, in a task, in a thread."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.support.tiny import run_overrides, save_tiny_model
from verl.host.daemon import run_async, run_in_daemon_thread
from verl.trainer.stall import StalledError, StallWatch, ending_stalls

LIMIT_S = 0.5


def stalled(work: Callable[[], Any], progress: Callable[[], object] = lambda: 0, limit_s: float = LIMIT_S) -> str:
    """The message with which the work ends."""
    loops: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        await work()

    where = "in step 2 of 3, rollout"
    watch = StallWatch(limit_s, progress, lambda: where, lambda: loops[0])
    with pytest.raises(StalledError) as ended, ending_stalls(watch):
        run_async(main())
    return str(ended.value)


async def reads_a_pipe(path: Path) -> None:
    path.read_text()


async def waits_for_ever() -> None:
    await asyncio.get_running_loop().create_future()


def test_code_that_blocks_the_event_loop_is_named(tmp_path: Path) -> None:
    """Nothing is written into the pipe. The task that catches every exception does not keep this one."""
    os.mkfifo(tmp_path / "reward.json")

    async def episode() -> None:
        with suppress(Exception):
            await reads_a_pipe(tmp_path / "reward.json")
        await waits_for_ever()

    message = stalled(episode)
    assert message.startswith("no progress for 0.5 s (trainer.stall_timeout_s), in step 2 of 3, rollout. Waiting: ")
    assert f"the main thread in {__file__}" in message and "(reads_a_pipe)" in message


def test_a_task_that_blocks_after_the_first_is_interrupted_too(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "reward.json")

    async def episode() -> None:
        try:
            await asyncio.sleep(0)
        finally:
            await reads_a_pipe(tmp_path / "reward.json")

    async def episodes() -> None:
        await asyncio.gather(episode(), episode())

    assert "(reads_a_pipe)" in stalled(episodes)


def test_the_waits_of_tasks_and_threads_are_named() -> None:
    never = threading.Event()

    def calls_a_worker() -> None:
        never.wait(60)

    async def work() -> None:
        episodes = [waits_for_ever() for _ in range(3)]
        await asyncio.gather(run_in_daemon_thread(calls_a_worker), *episodes)

    message = stalled(work)
    never.set()
    assert f"a task in {__file__}" in message and "(waits_for_ever) (3 times)" in message
    assert "a thread in" in message and "(calls_a_worker)" in message and "the main thread" not in message


def test_a_stopped_process_is_named() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        os.kill(child.pid, 19)
        message = stalled(waits_for_ever)
        child.kill()
    assert f"process {child.pid} (python" in message and "which is stopped" in message


def test_any_progress_counts() -> None:
    count = iter(range(1000))
    with ending_stalls(StallWatch(LIMIT_S, lambda: next(count), lambda: "", lambda: None)):
        time.sleep(3 * LIMIT_S)


def test_afterwards_nothing_is_watched() -> None:
    with ending_stalls(StallWatch(LIMIT_S, lambda: 0, lambda: "", lambda: None)):
        pass
    time.sleep(2 * LIMIT_S)
    assert "stall" not in [thread.name for thread in threading.enumerate()]


ENVIRONMENT = """
import os

from verl.envs.base import Observation


class Reads:
    def __init__(self, task):
        self.prompt = task.prompt

    async def reset(self):
        return Observation(self.prompt)

    async def step(self, message):
        raise AssertionError

    async def close(self):
        pass

    async def judge(self):
        os.path.exists("result.json") or os.mkfifo("result.json")
        open("result.json").read()
"""


@pytest.mark.long
def test_a_run_with_an_environment_that_blocks_ends(tmp_path: Path) -> None:
    """The whole command: one line names the line of the environment, and nothing of the run is left."""
    model = save_tiny_model(tmp_path / "model")
    (tmp_path / "reads.py").write_text(ENVIRONMENT)
    own = ["env.name=reads.py:Reads", "env.tool_call_format=toolrl", "reward.name=env", "trainer.stall_timeout_s=20"]
    overrides = [*run_overrides(model, tmp_path, "hf", 2), *own]
    run = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    output = " ".join(done.stdout.split())
    assert done.returncode == 1, done.stdout
    problem = "StalledError: no progress for 20 s (trainer.stall_timeout_s), in step 1 of 2, rollout. Waiting: "
    assert f"{problem}the main thread in {tmp_path}/reads.py:22 (judge)" in output
    (report,) = (tmp_path / "run" / "logs").glob("crash-*.txt")
    assert "reads.py" in report.read_text()
