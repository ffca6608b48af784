"""Nothing is left behind: neither by a killed owner of runtimes, nor by a hundred episodes at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import httpx2
import psutil
import pytest

from tests.conftest import ROOT
from tests.toolrl.benchmarks.runner.eval_play import chat
from tests.toolrl.envs.swe.test_swe_env import GOLD_TEXTS, Speaker, rollout, row_of
from tests.toolrl.sandbox.sandbox_host import need_bubblewrap
from tests.toolrl.swe.repositories import calc_task, pytest_environment, run
from tests.toolrl.swe.test_swe_remote import TOKEN, free_port, serving
from toolrl.envs.swe.env import SweFactory
from toolrl.swe import wire
from toolrl.swe.abandoned import LOCK, PREFIX, new_folder, remove_abandoned
from toolrl.swe.local import LocalRuntimes
from toolrl.swe.tasks import as_task_row
from verl.data.tasks import to_task
from verl.rollout.engine import Sampling
from verl.types import Completion

OWNER = """
import asyncio, contextlib, sys, time
from pathlib import Path
from tests.toolrl.swe.repositories import calc_task
from toolrl.swe.local import LocalRuntimes
from verl.host.scratch import scratch_folder

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
MORE_MIB = 600.0  # at any time: four runs of tests, and what this process takes more than before


class Gathering(Speaker):
    """Answers the second request of an episode when all have made theirs, and counts their runtimes."""

    def __init__(self) -> None:
        super().__init__(GOLD_TEXTS)
        self._all = asyncio.Barrier(NUM_EPISODES)
        self.runtimes, self.mib = 0, 0.0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
        if "assistant\n" in chat().tokenizer.decode(prompt_ids).partition("assistant\n")[2]:
            async with self._all as number:
                if number == 0:
                    self.runtimes, self.mib = runtimes_and_mib()  # blocks, so that no episode goes on
        return await super().generate(prompt_ids, sampling)


def runtimes_and_mib() -> tuple[int, float]:
    """Shells below this process, and the memory of all processes below it that are no servers."""
    shells, size = 0, 0
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            if "toolrl.swe.server" not in each.cmdline():
                size += each.memory_full_info().pss
                shells += each.name() == "bash"
    return shells, size / 2**20


async def watch(peak: dict[str, float]) -> None:
    """Keep the largest memory that is seen: below this process, and its own."""
    while True:
        _, below = await asyncio.to_thread(runtimes_and_mib)
        peak["below_mib"] = max(peak["below_mib"], below)
        peak["own_mib"] = max(peak["own_mib"], psutil.Process().memory_info().rss / 2**20)
        await asyncio.sleep(3)


@pytest.mark.slow
@pytest.mark.parametrize("num_servers", [0, 2])
def test_a_hundred_episodes_at_once_leave_nothing(
    num_servers: int,
    tmp_path: Path,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_testsuite_property: Callable[[str, object], None],
) -> None:
    """On two cores, with runtimes of this process or of two servers; with -s it prints the memory that they took."""
    need_bubblewrap()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setenv("VERL_SERVICE_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)  # images that are sent are kept in outputs/
    environment = pytest_environment(tmp_path / "environments")
    task = to_task(as_task_row(row_of(tmp_path, environment)), "calc#0")
    here, cores = psutil.Process(), sorted(os.sched_getaffinity(0))
    engine, peak = Gathering(), {"below_mib": 0.0, "own_mib": 0.0}

    async def main(urls: list[str]) -> None:
        factory = SweFactory(urls=urls, max_starting=8, max_running=NUM_EPISODES, max_scoring=4)
        group = replace(rollout(factory, GOLD_TEXTS, "env.turn_timeout_s=600"), engine=engine)
        watching = asyncio.create_task(watch(peak))
        (found,) = await group.run_all([task], NUM_EPISODES)
        watching.cancel()
        assert (found.rewards, found.faults) == ((1.0,) * NUM_EPISODES, ())
        assert list(place.rglob("episode-*")) == []
        for url in urls:
            assert httpx2.get(f"{url}/health", headers={wire.API_KEY: TOKEN}, trust_env=False).json() == {"leases": 0}
        await group.close()

    def state() -> tuple[set[int], int, list[str], str]:
        """Processes, descriptors, files and mounts."""
        below = {each.pid for each in here.children(recursive=True)}
        return below, here.num_fds(), sorted(map(str, place.iterdir())), Path("/proc/self/mountinfo").read_text()

    run(start_and_close(tmp_path, tmp_path / "first"))  # what the process opens once
    os.sched_setaffinity(0, cores[:2])
    try:
        with contextlib.ExitStack() as stack:
            ports = [free_port() for _ in range(num_servers)]
            for port in ports:
                command = [sys.executable, "-m", "toolrl.swe.server", "--port", str(port), "--capacity", "60"]
                command += ["--environments", str(tmp_path / "environments"), "--folder", str(tmp_path / f"{port}")]
                stack.enter_context(serving(command, port, tmp_path / f"{port}.log"))
            owners = {here.pid, *(each.pid for each in here.children())}
            before, own_mib = state(), here.memory_info().rss / 2**20
            run(main([f"http://127.0.0.1:{port}" for port in ports]), 900)
            assert until(lambda: state() == before), (state(), before)
        assert list(tmp_path.rglob("episode-*")) == []
        cgroups = [each.name for each in Path("/sys/fs/cgroup").rglob("verl-sandbox-*")]
        assert owners.isdisjoint(int(name.split("-")[2]) for name in cgroups)
    finally:
        os.sched_setaffinity(0, cores)
    measured = {
        "runtime_mib": engine.mib / NUM_EPISODES,
        "peak_mib": max(engine.mib, peak["below_mib"]),
        "own_mib": peak["own_mib"] - own_mib,
    }
    for name, mib in measured.items():
        record_testsuite_property(f"{name}_{num_servers}_servers", mib)
    print({name: round(mib, 1) for name, mib in measured.items()})
    assert engine.runtimes == NUM_EPISODES
    assert measured["runtime_mib"] < MEMORY_MIB
    assert measured["peak_mib"] < MEMORY_MIB * NUM_EPISODES + MORE_MIB and measured["own_mib"] < MORE_MIB
