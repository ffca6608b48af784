"""The temporary folder of a run: what is left of processes, shared memory and files after each kind of end."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.every import every
from toolrl.sandbox.cgroups import find_cgroups
from verl.errors import ConfigError
from verl.host import watcher
from verl.host.scratch import scratch_folder, variables

ROOT = Path(__file__).parents[3]
# A run that leaves as much as it can: a process of a session of its own, one with an empty environment, one that holds
# a semaphore and has lost the tracker that would remove it, and a copy of the controller, which holds its pipes open.
RUN = """
import json, os, psutil, signal, subprocess, sys, tempfile, time
from multiprocessing import get_context, resource_tracker
from verl.host import watcher
from verl.host.scratch import scratch_folder

if sys.argv[1] == "hold":
    lock = get_context("spawn").Lock()
    os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)
    print(json.dumps([lock._semlock.name, tempfile.mkdtemp()]), flush=True)
    time.sleep(600)

def fell_asleep(after):
    # The watcher's sleeps so far, once it is in a later one than `after`.
    sleeps = after
    while sleeps <= after:
        time.sleep(0.01)
        if watching.status() == psutil.STATUS_SLEEPING:
            sleeps = watching.num_ctx_switches().voluntary
    return sleeps

with scratch_folder() as folder:
    watching, = (each for each in psutil.Process().children() if watcher.__file__ in each.cmdline())
    daemon = subprocess.run(["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo $!"], capture_output=True)
    bare = subprocess.Popen(["sleep", "600"], env={})
    holder = subprocess.Popen([sys.executable, __file__, "hold"], stdout=subprocess.PIPE)
    semaphore, inner = json.loads(holder.stdout.readline())
    copy = os.fork()
    if copy == 0:
        time.sleep(600)
    facts = {"folder": str(folder), "inner": inner, "semaphore": semaphore,
             "pids": [int(daemon.stdout), bare.pid, holder.pid, copy]}
    print(json.dumps(facts), flush=True)
    fell_asleep(fell_asleep(-1))  # what carries no mark must have been seen: a look lies between two sleeps
    print("seen", flush=True)
    if sys.argv[1] == "wait":
        time.sleep(600)
    for pid in (bare.pid, copy):
        os.kill(pid, signal.SIGKILL)
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    """Start the run with a word; gives the process and what it prints about itself."""
    file = tmp_path / "run.py"
    file.write_text(RUN)
    started: list[subprocess.Popen[str]] = []

    def start(word: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [sys.executable, str(file), word],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        started.append(process)
        assert process.stdout is not None
        facts = json.loads(process.stdout.readline())
        assert process.stdout.readline() == "seen\n"
        return process, facts

    yield start
    for process in started:
        process.kill()
        process.communicate()


def watcher_of(pid: int) -> psutil.Process:
    """Among the children of a process, of which other tests may have left some that ended."""
    for _ in range(600):
        for each in psutil.Process(pid).children():
            with suppress(psutil.Error):
                if watcher.__file__ in each.cmdline():
                    return each
        time.sleep(0.05)
    raise AssertionError(f"no watcher among {psutil.Process(pid).children()}")


def running(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def wait_until_gone(facts: dict[str, Any]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (running(facts["pids"]) or Path(facts["folder"]).exists()):
        time.sleep(0.1)
    assert running(facts["pids"]) == []
    assert not Path(facts["folder"]).exists()
    assert not Path(f"/dev/shm/sem.{facts['semaphore'].removeprefix('/')}").exists()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_a_killed_run_leaves_nothing_but_one_paragraph(run: Any, number: signal.Signals) -> None:
    process, facts = run("wait")
    assert len(running(facts["pids"])) == 4
    assert Path(facts["inner"]).is_relative_to(facts["folder"])
    watching = watcher_of(process.pid)
    assert watching.memory_info().rss < 20 << 20
    process.send_signal(number)
    wait_until_gone({**facts, "pids": [*facts["pids"], watching.pid]})
    _, output = process.communicate(timeout=30)
    assert output.count("\n\n") == 0 and f"The controller (process {process.pid}) ended without" in output
    assert "to resume from the last checkpoint" in output


@pytest.mark.long
def test_a_run_that_ends_leaves_nothing_and_prints_nothing(run: Any) -> None:
    process, facts = run("end")
    _, output = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, "")
    wait_until_gone(facts)


def test_a_run_whose_watcher_was_killed_leaves_nothing(run: Any) -> None:
    with scratch_folder() as folder:
        daemon = subprocess.run(["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo $!"], stdout=subprocess.PIPE)
        watcher_of(os.getpid()).kill()
    assert running([int(daemon.stdout)]) == [] and not folder.exists()


def test_cgroups_of_a_killed_run_are_gone() -> None:
    cgroups = find_cgroups()
    if cgroups is None:
        pytest.skip("no cgroup can be made here")
    code = """
        import sys, time
        from toolrl.sandbox.cgroups import CgroupPool, find_cgroups
        from verl.host.scratch import scratch_folder
        with scratch_folder():
            pool = CgroupPool(find_cgroups())
            pool.make()
            print(pool._name, flush=True)
            time.sleep(600)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    folders = cgroups.folders(process.stdout.readline().strip())
    assert every(folder.is_dir() for folder in folders)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while any(folder.exists() for folder in folders) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(folder.exists() for folder in folders)


def test_own_children_and_the_shared_memory_of_others_stay() -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="psm_") as other:
        with scratch_folder():
            child = subprocess.Popen(["sleep", "600"])
        assert running([child.pid]) == [child.pid]
        child.kill()
        child.wait()
        assert Path(other.name).exists()


ENDING = """
import os, signal, sys
from multiprocessing import get_context, resource_tracker

lock = get_context("spawn").Lock()
os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)
print(lock._semlock.name, flush=True)
sys.stdin.read()
os._exit(0)
"""


def test_shared_memory_of_a_child_that_ends_a_little_later_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "_TRACKER_S", 60.0)  # how much later depends on the machine
    with (
        scratch_folder() as folder,
        subprocess.Popen(
            [sys.executable, "-c", ENDING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child,
    ):
        assert child.stdin is not None and child.stdout is not None
        semaphore = Path("/dev/shm/sem." + child.stdout.readline().strip().removeprefix("/"))
        assert semaphore.exists()
        run = watcher.RunProcesses(str(folder), os.getpid())
        run.look()
        threading.Timer(1.0, child.stdin.close).start()
        run.tidy()
        assert not semaphore.exists()


# The watcher, which finds at every look, until the controller has gone, that the child has just written.
WATCHED = """
import os, sys, time
from verl.host import watcher

folder, controller = sys.argv[1], int(sys.argv[2])
wait, written = time.sleep, True

def sleep(seconds):
    global written
    wait(seconds)
    if written:
        os.makedirs(folder + "/a", exist_ok=True)
    written = os.getppid() == controller

watcher.time.sleep = sleep
sys.exit(watcher.main(folder, controller))
"""
HASTY = """
import os, subprocess, sys, tempfile, time

folder = tempfile.mkdtemp(prefix="verl-")
command = [sys.executable, "-c", sys.argv[1], folder, str(os.getpid())]
process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
writer = subprocess.Popen(["sleep", "600"])
print(folder, writer.pid, process.pid, flush=True)
time.sleep(1)
process.stdin.write(b"-")
process.stdin.flush()
time.sleep(2)
os._exit(130)
"""


@pytest.mark.long
def test_a_folder_to_which_a_child_writes_is_removed_once_the_controller_is_gone() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", HASTY, WATCHED]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    folder, *pids = process.stdout.readline().split()
    assert process.wait(60) == 130
    deadline = time.monotonic() + 40
    while running([int(pid) for pid in pids]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(folder).exists() and not running([int(pid) for pid in pids])


def test_the_folder_is_private_short_and_its_variables_end_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    before = dict(os.environ)
    with scratch_folder() as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert os.environ["TMPDIR"] == str(folder / "tmp")
        assert folder.parent == Path(tempfile.gettempdir())  # this process keeps the folder that it had
    assert dict(os.environ) == before
    long = tmp_path / ("long" * 10)
    long.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(long))
    with scratch_folder() as folder:
        assert folder.parent == Path("/tmp")


def test_a_place_where_no_folder_can_be_made_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/proc/1")
    with pytest.raises(ConfigError, match=r"in '/proc/1' .*; point TMPDIR to a folder with free space"):
        scratch_folder().__enter__()


def test_variables_are_set_and_unset_during_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONE", "1")
    monkeypatch.delenv("TWO", raising=False)
    with pytest.raises(KeyError), variables({"ONE": None, "TWO": "2"}):
        assert "ONE" not in os.environ and os.environ["TWO"] == "2"
        raise KeyError
    assert os.environ["ONE"] == "1" and "TWO" not in os.environ
