"""One process at a time in a folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import ROOT
from tests.support.programs import need
from tests.support.until import until
from verl.errors import ConfigError, DataError
from verl.host import lock
from verl.host.lock import alone_in

HOLDS = """
import os, sys, time
from pathlib import Path
from types import SimpleNamespace
from verl.host.lock import alone_in
with alone_in(Path(sys.argv[1])):
    print(os.getpid(), flush=True)
    time.sleep(float(sys.argv[2]))
"""


@contextmanager
def held(folder: Path, *before: str) -> Iterator[int]:
    command = [*before, sys.executable, "-c", HOLDS, str(folder), "100"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)  # which `before` may have started
        process.wait()


def test_a_second_run_is_refused_with_host_and_process_of_the_first(tmp_path: Path) -> None:
    who = rf"another run is writing to .*: process \d+ on {socket.gethostname()}; let it end, or go elsewhere"
    with held(tmp_path) as first, pytest.raises(ConfigError, match=who) as refused, alone_in(tmp_path, "go elsewhere"):
        pass
    assert f"process {first} " in str(refused.value)


def test_the_same_process_is_refused_as_well(tmp_path: Path) -> None:
    with alone_in(tmp_path), pytest.raises(ConfigError, match=f"process {os.getpid()} "), alone_in(tmp_path):
        pass
    with alone_in(tmp_path):
        pass


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with held(tmp_path) as first:
        pass
    with alone_in(tmp_path):
        pass
    assert "checking" not in caplog.text  # no process needed to be watched
    assert f"taken over from process {first} on {socket.gethostname()}" in caplog.text
    caplog.clear()
    with alone_in(tmp_path):
        pass
    assert caplog.text == ""


@pytest.mark.parametrize("clock", ["+400d", "-400d"])
def test_a_clock_that_is_wrong_changes_nothing(clock: str, tmp_path: Path) -> None:
    need("faketime")
    with held(tmp_path, "faketime", "-f", clock), pytest.raises(ConfigError, match="another run"), alone_in(tmp_path):
        pass
    with alone_in(tmp_path):
        pass


@pytest.mark.parametrize("alive", [True, False])
def test_an_owner_on_another_host_lives_as_long_as_it_counts(
    alive: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a file system keeps the locks of each host apart."""
    path, watched_s = tmp_path / ".lock", list[float]()

    def write(beats: int) -> None:
        other = path.with_name("other")
        other.write_text(json.dumps({"host": "elsewhere", "pid": 7, "beats": beats}))
        other.replace(path)

    def watch(seconds: float) -> None:
        watched_s.append(seconds)
        write(int(alive))

    monkeypatch.setattr(lock, "time", SimpleNamespace(sleep=watch))
    write(0)
    if alive:
        with pytest.raises(ConfigError, match="process 7 on elsewhere"), alone_in(tmp_path):
            pass
    else:
        with alone_in(tmp_path):
            pass
        assert "taken over from process 7 on elsewhere" in caplog.text
    assert watched_s == [lock._WATCHED_S] and lock._WATCHED_S > 3 * lock._BEAT_S


def test_without_file_locks_only_counting_remains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    def watch(_: float) -> None:
        """Until the owner, a thread, has counted."""
        before = (tmp_path / ".lock").read_text()
        until(lambda: (tmp_path / ".lock").read_text() != before)

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(lock, "_BEAT_S", 0.1)
    monkeypatch.setattr(lock, "time", SimpleNamespace(sleep=watch))
    with alone_in(tmp_path), pytest.raises(ConfigError, match=f"process {os.getpid()} "), alone_in(tmp_path):
        pass
    with alone_in(tmp_path):
        pass


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, '{"pid": 1}', "\0\xff"])
def test_any_content_of_a_lock_file_is_accepted(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_WATCHED_S", 0.0)
    (tmp_path / ".lock").write_text(text, encoding="latin-1")
    with alone_in(tmp_path):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be written .*another path"), alone_in(tmp_path / "file" / "run"):
        pass
