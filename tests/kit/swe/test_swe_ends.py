"""Nothing is left behind: neither by a killed owner of runtimes, nor by a hundred episodes at once."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT
from tests.kit.evaluation.eval_play import chat
from tests.kit.sandbox.sandbox_host import need_bubblewrap
from tests.kit.swe.repositories import calc_task, pytest_environment, run
from tests.kit.swe.test_swe_env import GOLD_TEXTS, Speaker, rollout, row_of
from verl.data.tasks import to_task
from verl.kit.swe.abandoned import LOCK, PREFIX, new_folder, remove_abandoned
from verl.kit.swe.env import SweFactory
from verl.kit.swe.local import LocalRuntimes
from verl.kit.swe.tasks import as_task_row
from verl.rollout.engine import Sampling
from verl.types import Completion

OWNER = """
import asyncio, contextlib, sys, time
from pathlib import Path
from tests.kit.swe.repositories import calc_task
from verl.kit.swe.local import LocalRuntimes
from verl.system.scratch import scratch_folder

async def main(folder):
    runtimes = LocalRuntimes()
    for _ in range(2):
        runtime = await runtimes.start(calc_task(folder))
        await runtime.run("echo much > /tmp/file; echo more > calc/new.py; (setsid sleep 4711 &)")
    await runtime.snapshot()
    print(runtimes.episodes, flush=True)
    time.sleep(60)

with scratch_folder() if sys.argv[2] == "run" else contextlib.nullcontext():
    asyncio.run(main(Path(sys.argv[1])))
"""


def until(holds: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.1)
    return holds()


@pytest.fixture
def place() -> Iterator[Path]:
    """For temporary files, with a path that is short enough for a run."""
    with tempfile.TemporaryDirectory(prefix="ends-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.long
@pytest.mark.parametrize("where", ["run", "alone"])
def test_a_killed_owner_leaves_no_process_no_mount_and_no_folder(where: str, tmp_path: Path, place: Path) -> None:
    """In a run its watcher removes the folder; else the next owner of runtimes in the same place does."""
    need_bubblewrap()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(place), "RAY_TMPDIR": str(place)}
    command = [sys.executable, "-c", OWNER, str(tmp_path / "task"), where]
    owner = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        assert folder.is_relative_to(place) and len(list(folder.glob("episode-*/now"))) == 2
        assert until(lambda: len(asleep(owner.pid)) == 2)
        started = psutil.Process(owner.pid).children(recursive=True)
    finally:
        owner.kill()
        owner.wait()
    assert until(lambda: not any(each.is_running() for each in started)), started
    assert str(folder) not in Path("/proc/self/mountinfo").read_text()
    if where == "alone":
        run(start_and_close(place, tmp_path / "task"))
    assert until(lambda: not folder.exists()), list(folder.iterdir())
    assert until(lambda: list(place.glob("verl-*")) == [])


def asleep(pid: int) -> list[psutil.Process]:
    return [each for each in psutil.Process(pid).children(recursive=True) if each.cmdline()[:2] == ["sleep", "4711"]]


async def start_and_close(place: Path, task: Path) -> None:
    runtimes = LocalRuntimes(place)
    await (await runtimes.start(calc_task(task))).close()
    await runtimes.close()


def test_folders_of_living_owners_and_of_others_stay(tmp_path: Path) -> None:
    mine, lock = new_folder(tmp_path)
    dead, other_lock = new_folder(tmp_path)
    os.close(other_lock)
    foreign = tmp_path / f"{PREFIX}foreign"  # no lock: it may just begin
    foreign.mkdir()
    remove_abandoned(tmp_path)
    assert mine.exists() and foreign.exists() and not dead.exists()
    os.close(lock)
    assert (mine / LOCK).exists()
    remove_abandoned(tmp_path)
    assert not mine.exists()


NUM_EPISODES = 100
MEMORY_MIB = 20.0  # of a runtime: its supervisor, its shell and their share of common pages; 11 where it was measured


class Gathering(Speaker):
    """Answers the second request of an episode when all have made theirs, and measures the memory of their runtimes."""

    def __init__(self) -> None:
        super().__init__(GOLD_TEXTS)
        self._all = asyncio.Barrier(NUM_EPISODES)
        self.runtimes, self.mib = 0, 0.0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
        if "assistant\n" in chat().tokenizer.decode(prompt_ids).partition("assistant\n")[2]:
            async with self._all as number:
                if number == 0:
                    below = psutil.Process().children(recursive=True)
                    self.runtimes = sum(each.name() == "bash" for each in below)
                    self.mib = sum(each.memory_full_info().pss for each in below) / 2**20
        return await super().generate(prompt_ids, sampling)


@pytest.mark.slow
def test_a_hundred_episodes_at_once_leave_nothing(
    tmp_path: Path, record_testsuite_property: Callable[[str, object], None]
) -> None:
    need_bubblewrap()
    environment = pytest_environment(tmp_path)
    task = to_task(as_task_row(row_of(tmp_path, environment)), "calc#0")
    here = psutil.Process()
    engine = Gathering()

    async def main() -> Path:
        factory = SweFactory(max_starting=8, max_running=NUM_EPISODES, max_scoring=4)
        group = replace(rollout(factory, GOLD_TEXTS, "env.turn_timeout_s=600"), engine=engine)
        folder: Path = factory.runtimes.episodes  # type: ignore[attr-defined]
        (found,) = await group.run_all([task], NUM_EPISODES)
        assert (found.rewards, found.faults) == ((1.0,) * NUM_EPISODES, ())
        assert list(folder.glob("episode-*")) == []
        await group.close()
        return folder

    run(start_and_close(tmp_path, tmp_path / "first"))  # what the process opens once
    before = {each.pid for each in here.children(recursive=True)}, here.num_fds()
    folder = run(main(), 900)
    assert until(lambda: ({each.pid for each in here.children(recursive=True)}, here.num_fds()) == before)
    assert not folder.exists() and str(folder) not in Path("/proc/self/mountinfo").read_text()
    assert list(Path("/sys/fs/cgroup").rglob(f"verl-sandbox-{here.pid}-*")) == []
    assert engine.runtimes == NUM_EPISODES
    record_testsuite_property("mib_per_runtime", engine.mib / NUM_EPISODES)
    assert engine.mib < MEMORY_MIB * NUM_EPISODES, f"{engine.mib:.0f} MiB"
