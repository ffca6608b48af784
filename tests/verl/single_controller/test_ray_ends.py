"""What a run reports, and leaves, when Ray's own processes die, are stopped, or kill for memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
RUN = """
import os, signal, sys, threading, time
import psutil
from verl.single_controller.group import WorkerError
from verl.single_controller.ray import Bundle, Cluster

def nap(worker):
    time.sleep(300)

if __name__ == "__main__":
    _, name, number = sys.argv
    started = 0.0

    def hit():
        global started
        target, = (each for each in psutil.Process().children() if each.name() == name)
        print("pid", target.pid, flush=True)
        started = time.monotonic()
        target.send_signal(int(number))

    try:
        with Cluster.start(2, health_timeout_s=5.0) as cluster:
            group = cluster.group("tester", lambda seat: seat, cluster.pool([Bundle()]), Bundle())
            threading.Timer(2.0, hit).start()
            try:
                group.call(nap)
            finally:
                print("caught", time.monotonic() - started, flush=True)
                group.close()
    except WorkerError as error:
        print("error", error, flush=True)
        sys.exit(1)
"""


@pytest.mark.parametrize(
    ("name", "number", "problem"),
    [
        ("raylet", 9, "the raylet (process {}) on this machine died"),
        ("gcs_server", 9, "the control service of Ray (process {}) on this machine died"),
        ("raylet", 19, "the raylet (process {}) on this machine has been stopped"),
        (
            "gcs_server",
            19,
            "the control service of Ray (process {}) on this machine has been stopped",
        ),
    ],
)
def test_the_process_that_died_is_the_one_that_is_reported(
    name: str, number: int, problem: str, tmp_path: Path
) -> None:
    (tmp_path / "run.py").write_text(RUN)
    scratch = tmp_path.parents[2] / f"t{os.getpid()}"  # short enough for Ray's sockets
    scratch.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": str(scratch)}
    environment.pop("RAY_ADDRESS", None)
    try:
        ended = subprocess.run(
            [sys.executable, tmp_path / "run.py", name, str(number)],
            capture_output=True,
            text=True,
            env=environment,
            timeout=240,
            check=False,
        )
        lines = (line.partition(" ") for line in ended.stdout.splitlines())
        printed = {first: rest for first, _, rest in lines if first in ("pid", "caught", "error")}
        assert ended.returncode == 1, ended.stdout + ended.stderr
        assert problem.format(printed["pid"]) in printed["error"]
        assert float(printed["caught"]) < 30
        assert list(scratch.iterdir()) == []
        assert [each for each in psutil.process_iter() if _mentions(each, str(scratch))] == []
    finally:
        scratch.rmdir()


def _mentions(process: psutil.Process, folder: str) -> bool:
    try:
        return any(folder in word for word in process.cmdline())
    except psutil.Error:
        return False


HURRIED = """
import os, ray
from pathlib import Path
from verl.single_controller import ray as ours
from verl.single_controller.ray import Cluster

whole = ray.shutdown
calls = []

def interrupted(*args, **kwargs):
    calls.append(args)
    if len(calls) == 1:
        raise KeyboardInterrupt
    whole(*args, **kwargs)

ours.ray.shutdown = interrupted
try:
    with Cluster.start(1):
        folder = Path(os.environ["TMPDIR"]).parent
        print(folder, folder.is_dir(), flush=True)
except KeyboardInterrupt:
    print(len(calls), ray.is_initialized(), folder.exists(), flush=True)
"""


def test_a_forced_shutdown_leaves_no_temporary_folder(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", HURRIED], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    (folder, there), ended = (line.split() for line in done.stdout.splitlines())
    assert there == "True" and ended == ["2", "False", "False"]
    assert not Path(folder).exists(), "Ray's own end has made it anew"
