"""Stopped processes, distinguished from those that go on in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from verl.single_controller.process_watch import StopWatch, end_of_child, machine, oom_kills, statuses

T, S = psutil.STATUS_STOPPED, psutil.STATUS_SLEEPING


def test_only_processes_stopped_at_every_check_are_lost() -> None:
    now = 0.0
    watch = StopWatch(30.0, lambda: now)
    looks = [
        (0.0, {1: T, 2: T, 3: S, 4: psutil.STATUS_TRACING_STOP}, []),
        (20.0, {1: S, 2: T, 3: S, 4: psutil.STATUS_TRACING_STOP}, []),  # 1 went on
        (29.0, {1: T, 2: T, 3: T, 4: psutil.STATUS_TRACING_STOP}, []),
        (30.0, {1: T, 2: T, 3: T, 4: psutil.STATUS_TRACING_STOP}, [2]),
        (58.9, {1: T, 3: T}, []),  # 2 is gone
        (59.0, {1: T, 3: T}, [1, 3]),
    ]
    for at, seen, lost in looks:
        now = at
        assert watch.lost(seen) == lost
    assert watch.reason == "has not responded for 30 s; its process is stopped"


def test_a_stopped_process_is_seen_as_such() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        os.kill(process.pid, signal.SIGSTOP)
        while statuses([process.pid]) != {process.pid: T}:
            pass
        process.kill()
    assert statuses([process.pid]) == {}


def test_all_processes_of_a_machine_have_the_same_machine_id() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from verl.single_controller.process_watch import machine; print(machine())"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == machine()


def test_the_end_of_a_child_is_described_without_reaping_it() -> None:
    for code, description, returned in (
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL", -9),
        ("raise SystemExit(3)", "ended with exit code 3", 3),
    ):
        with subprocess.Popen([sys.executable, "-c", code]) as child:
            assert end_of_child(child.pid) == description
            assert child.wait() == returned
        assert end_of_child(child.pid) == ""
    assert oom_kills() >= 0


def test_kills_for_lack_of_memory_are_none_where_the_kernel_counts_none(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("pgfault 7\noom_kill 3\n")
    assert oom_kills(tmp_path / "vmstat") == 3
    assert oom_kills(tmp_path / "nowhere") == 0
