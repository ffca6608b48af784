"""The driver of the measurements on a GPU machine, with measurements that take no time, in real processes."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from bench.gpu import process, tree
from bench.gpu.child import plain
from bench.gpu.ledger import seed
from bench.gpu.measurements import SESSIONS, UnexpectedError, measured
from bench.gpu.place import Place
from bench.gpu.process import DiedError, SessionProcess
from bench.gpu.rows import read_rows
from bench.gpu.short import MARGIN_S, NO_GPU, SPENT, Driver, now, read_options
from bench.gpu.tree import REPOSITORY_MIB, Tree
from tests.conftest import ROOT, need_vllm
from tests.support.fake_measurements import calls
from verl.errors import DataError

FAKES = [sys.executable, "-m", "tests.support.fake_measurements"]
Call = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def call(tmp_path: Path) -> Call:
    """One call of the driver on a machine whose output folder is emptied before."""

    def run(*options: str, out: Path | None = None, **more: Any) -> subprocess.CompletedProcess[str]:
        out = out or tmp_path / "out"
        shutil.rmtree(out, ignore_errors=True)
        return subprocess.run(command(tmp_path, out, *options), cwd=ROOT, capture_output=True, text=True, **more)

    return run


def command(tmp_path: Path, out: Path, *options: str) -> list[str]:
    return [*FAKES, "--rehearse", "--work", str(tmp_path / "work"), "--out", str(out), "--spent", "0", *options]


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def states(path: Path) -> dict[str, str]:
    return {row["name"]: row["state"] for row in rows(path)}


def started_call(tmp_path: Path, *options: str, until: str) -> subprocess.Popen[str]:
    """A call in whose middle a measurement hangs, with a daemon."""
    process = subprocess.Popen(
        command(tmp_path, tmp_path / "out", *options),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 200
    while not (tmp_path / "work" / until).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return process


def began(tmp_path: Path) -> float:
    return float((tmp_path / "work/began").read_text().split()[1])


def ended(tmp_path: Path) -> bool:
    """Whether the hanging measurement's daemon is gone, some seconds later at most."""
    pid, deadline = int((tmp_path / "work/daemon").read_text()), time.monotonic() + 120
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_measurements_run_in_order_and_failures_once_more_at_the_end(call: Call, tmp_path: Path) -> None:
    """A failure that may have broken the process costs the next one a new process, and no result."""
    names = ("one", "wrong", "recovers", "two", "dies", "late")
    done = call(*names)
    assert done.returncode == 1
    assert calls(tmp_path / "work") == ["one", "wrong", "recovers", "two", "dies", "late", "wrong", "recovers", "dies"]
    found = rows(tmp_path / "out/results.jsonl")
    assert [(row["name"], row["state"]) for row in found] == [
        ("one", "ok"),
        ("wrong", "failed"),
        ("recovers", "failed"),
        ("two", "ok"),
        ("dies", "failed"),
        ("late", "ok"),
        ("wrong", "failed"),
        ("recovers", "ok"),
        ("dies", "failed"),
    ]
    assert found == rows(tmp_path / "work/results.jsonl")
    assert found[1]["figures"] == {"a value: ms": 1.5} and found[1]["reason"] == "2 is not 3"
    assert "no such device (fake_measurements.py:" in found[2]["reason"]
    assert found[4]["reason"] == "its process was killed by SIGKILL; its log ends with: the last line"
    assert found[0]["versions"]["torch"] and found[0]["device"] == "cpu, a rehearsal"
    assert done.stdout == (tmp_path / "out/table.md").read_text() + "\n"
    assert (
        "| wrong | failed | 2 is not 3 |\n| wrong | a value: ms | 1.5 |\n| recovers | a value: ms | 1.5 |"
        in done.stdout
    )
    assert "the last line" in (tmp_path / "out/dies.log").read_text()


def test_a_second_try_has_a_process_of_its_own(call: Call, tmp_path: Path) -> None:
    """Also if none ran between: later measurements may have left the first one's process broken."""
    call("wrong", "two")
    lines = [line.split() for line in (tmp_path / "work/calls").read_text().splitlines()]
    assert [name for name, _ in lines] == ["wrong", "two", "wrong"]
    first, second, third = (pid for _, pid in lines)
    assert first == second != third


def test_the_next_call_skips_done_and_twice_failed_measurements(call: Call, tmp_path: Path) -> None:
    only = "--budget=900"
    assert call(only, "one", "wrong").returncode == 1
    (tmp_path / "work/calls").unlink()
    (tmp_path / "work/results.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*rows(tmp_path / "out/results.jsonl"), *others()])
    )
    assert call(only).returncode == 1
    assert calls(tmp_path / "work") == ["two"]
    assert {"one", "wrong", "two"} < states(tmp_path / "out/results.jsonl").keys(), "earlier results come back, too"
    named = call(only)
    assert named.returncode == 1 and "not tried again by the next call, unless it names them: wrong\n" in named.stderr
    assert {"one", "wrong", "two"} < states(tmp_path / "out/results.jsonl").keys(), "also if there is nothing to do"
    call(only, "one")
    assert calls(tmp_path / "work") == ["two", "one"], "what is named is measured anew"


OK = {
    "state": "ok",
    "reason": None,
    "figures": {},
    "seconds": 1.0,
    "versions": {},
    "device": "x",
    "rehearsal": True,
    "time": 0,
}


def others() -> list[dict[str, Any]]:
    """Everything but `two` is done."""
    names = ("recovers", "warm", "hangs", "dies", "waits", "begins", "follows", "ends", "lacks", "late")
    return [{"name": name, **OK} for name in names]


def test_a_process_that_does_not_start_costs_one_start_a_round(call: Call, tmp_path: Path) -> None:
    """All others have their turn first. The second try knows of the failure, and may start otherwise."""
    names = ("one", "begins", "follows", "ends", "late")
    assert call(*names).returncode == 0
    assert calls(tmp_path / "work") == ["one", "late", "follows", "ends", "begins"]
    found = [(row["name"], row["state"]) for row in rows(tmp_path / "out/results.jsonl")]
    assert found[:4] == [("one", "ok"), ("begins", "failed"), ("follows", "skipped"), ("ends", "skipped")]
    (tmp_path / "work/never").touch()
    (tmp_path / "work/starts").unlink()
    assert call(*names).returncode == 1
    assert (tmp_path / "work/starts").read_text().count("start") == 3, "in three rounds"
    assert states(tmp_path / "out/results.jsonl") == dict.fromkeys(names, "ok") | {
        "begins": "failed",
        "follows": "failed",
        "ends": "skipped",
    }


def test_failures_wait_for_the_last_archive(call: Call, tmp_path: Path) -> None:
    """What the next call brings is worth more than a second try."""
    stage = tmp_path / "stage"
    (stage.mkdir(), (stage / "SUMS").write_text(piece(stage, "engine", "package_of_a_tree")))
    (stage / "engine.tar.xz").rename(tmp_path / "later.tar.xz")
    (earlier := tmp_path / "earlier.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in others() if row["name"] not in ("begins", "follows", "lacks", "late"))
    )
    call("--done", str(earlier), "--stage", str(stage))
    first = ["one", "wrong", "two", "late"]
    assert calls(tmp_path / "work") == first
    (tmp_path / "later.tar.xz").rename(stage / "engine.tar.xz")
    call("--stage", str(stage))
    assert calls(tmp_path / "work") == [*first, "follows", "lacks", "wrong", "begins"]


@pytest.mark.long
def test_a_measurement_that_hangs_is_killed_with_its_daemons(call: Call, tmp_path: Path) -> None:
    call("warm", "hangs", "late")
    reasons = {row["name"]: row["reason"] for row in rows(tmp_path / "out/results.jsonl")}
    assert reasons["hangs"] == "not finished within 16 s", "the retry, whose limit includes a new process"
    assert reasons["late"] is None and ended(tmp_path)
    assert calls(tmp_path / "work") == ["warm", "hangs", "late", "hangs"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_call_that_is_cut_off_loses_nothing_but_the_running_measurement(
    number: signal.Signals, call: Call, tmp_path: Path
) -> None:
    process = started_call(tmp_path, "one", "waits", "late", until="daemon")
    process.send_signal(number)
    out, output = process.communicate(timeout=200)
    assert ended(tmp_path), "nothing that it started is left"
    assert states(tmp_path / "out/results.jsonl") == {"one": "ok"}
    if number is signal.SIGTERM:
        assert "ended by SIGTERM; the next call goes on" in output and "| one | a value: ms | 1.5 |" in out
    remaining = [name for name in ("one", "late") if name not in states(tmp_path / "work/results.jsonl")]
    assert call(*remaining).returncode == 0
    assert states(tmp_path / "out/results.jsonl") == {"one": "ok", "late": "ok"}


def test_a_driver_that_is_killed_at_once_leaves_no_process_that_measures(tmp_path: Path) -> None:
    """Its child is still importing, and would measure beside the next call, on the same GPU."""
    for number in range(5):  # a fast child may have started by the time of the kill
        place = tmp_path / str(number)
        place.mkdir()
        process = started_call(place, "waits", until="began")
        while not (started := running_sessions(process.pid)):
            time.sleep(0.001)
        process.kill()
        process.communicate()
        _, alive = psutil.wait_procs(started, timeout=120)
        assert not alive
        if not calls(place / "work"):
            return
    pytest.fail("no child was killed while it was importing")


def test_calls_do_not_run_beside_each_other(call: Call, tmp_path: Path) -> None:
    """They would share the GPU, and each would replace the other's results."""
    first = started_call(tmp_path, "one", "waits", until="daemon")
    second = call("late", out=tmp_path / "another")
    assert second.returncode == 1 and "another call is running there" in second.stderr
    assert second.stderr.count("\n") == 1 and calls(tmp_path / "work") == ["one", "hangs"]
    first.kill()
    first.communicate()
    assert call("late").returncode == 0, "the lock ends with its process"


def test_signals_ignored_by_the_shell_do_not_end_a_call(tmp_path: Path) -> None:
    """`nohup` lets a call survive its terminal."""
    arguments = ["nohup", *command(tmp_path, tmp_path / "out", "one", "warm", "late")]
    process = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (tmp_path / "work/logs").exists():  # the handlers are there
        time.sleep(0.02)
    process.send_signal(signal.SIGHUP)
    assert process.wait(200) == 0
    assert states(tmp_path / "out/results.jsonl") == {"one": "ok", "warm": "ok", "late": "ok"}


def test_messages_that_cannot_be_written_cost_no_measurement(tmp_path: Path) -> None:
    """A full disk behind both, or a terminal that has gone."""
    with Path("/dev/full").open("w") as full:
        subprocess.run(command(tmp_path, tmp_path / "out", "one", "late"), cwd=ROOT, stdout=full, stderr=full)
    assert states(tmp_path / "out/results.jsonl") == {"one": "ok", "late": "ok"}
    shutil.rmtree(tmp_path / "out")
    arguments = command(tmp_path, tmp_path / "out", "two", "warm")
    process = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    process.stdout.close()
    process.wait(200)
    assert states(tmp_path / "out/results.jsonl").items() >= {"two": "ok", "warm": "ok"}.items()
    assert (tmp_path / "out/table.md").exists()


@pytest.mark.long
def test_at_the_limit_it_stops_cleanly(call: Call, tmp_path: Path) -> None:
    done = call("--budget=30", "one", "waits", "late")
    assert done.returncode == 4 and "the time of the call or of the budget is used up" in done.stderr
    assert now() < began(tmp_path) + 30
    found = {row["name"]: row for row in rows(tmp_path / "out/results.jsonl")}
    assert found["one"]["state"] == "ok" and found["waits"]["state"] == found["late"]["state"] == "skipped"
    assert "cut off after" in found["waits"]["reason"] and "0 s are left" in found["late"]["reason"]
    assert ended(tmp_path) and "| late | skipped |" in done.stdout


@pytest.mark.parametrize("limit", ["--budget=5", "--call-seconds=5"])
def test_a_limit_that_holds_nothing_starts_nothing(limit: str, call: Call, tmp_path: Path) -> None:
    done = call(limit, "one", "late")
    assert calls(tmp_path / "work") == []
    assert done.stdout.count("| skipped | takes about 2 s, and 0 s are left |") == 2


def test_time_between_calls_counts(call: Call, tmp_path: Path) -> None:
    call("--budget=100", "one")
    path = tmp_path / "work/began"
    path.write_text(path.read_text().replace(str(began(tmp_path)), str(began(tmp_path) - 90)))
    call("--budget=100", "late")
    assert "late" not in calls(tmp_path / "work")


@pytest.mark.parametrize("text", ["", "1795866319.0", "another-machine 0.0", "{machine} 1e12", "{machine} nan"])
def test_the_time_of_another_machine_does_not_count(text: str, call: Call, tmp_path: Path) -> None:
    """A work folder may be a copy, and a full disk may have cut the file off."""
    (tmp_path / "work").mkdir()
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    (tmp_path / "work/began").write_text(text.format(machine=machine))
    call("--budget=100", "one")
    assert calls(tmp_path / "work") == ["one"]


def test_a_clock_that_is_set_changes_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the first minute of a new machine, whose clock was hours off."""
    options = read_options(["--rehearse", "--work", str(tmp_path), "--spent=0", "--budget=100"], SESSIONS)
    driver = Driver(options, SESSIONS, "x", now())
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert 80 < driver.time_left <= 90
    monkeypatch.setattr(time, "time", lambda: 1e12)
    assert 80 < driver.time_left <= 90
    assert 80 < Driver(options, SESSIONS, "x", now()).time_left <= 90


def test_the_number_of_fetched_files_is_limited(call: Call, tmp_path: Path) -> None:
    """One of them is kept for a file that is being replaced."""
    done = call("--files-out=4", "one", "wrong", "dies")
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == ["results.jsonl", "table.md", "wrong.log"]
    assert "dies.log is left out" in done.stderr


def test_without_a_folder_for_results_they_are_kept_and_printed(call: Call, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = call("one", out=tmp_path / "file/out")
    assert done.returncode == 0 and "| one | a value: ms | 1.5 |" in done.stdout
    assert f"the results are in {tmp_path / 'work/results.jsonl'}" in done.stderr and "Traceback" not in done.stderr
    assert states(tmp_path / "work/results.jsonl") == {"one": "ok"}


def test_on_a_full_disk_the_results_are_printed(call: Call, tmp_path: Path) -> None:
    """A limit of the size of files has the same effect as a full disk."""
    size = 1000

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    done = call("one", "two", "warm", "late", preexec_fn=limited)
    assert "no space left on" in done.stderr and "Traceback" not in done.stderr
    assert done.stdout.count("a value: ms") == 4, "all are in the table"
    assert 0 < len(rows(tmp_path / "work/results.jsonl")) < 4, "whole lines"


def test_without_room_for_anything_the_figures_are_printed(call: Call, tmp_path: Path) -> None:
    """Answers need no disk, and there is none for logs."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work/logs").write_text("no folder")

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    done = call("one", "wrong", "late", preexec_fn=limited)
    assert done.stdout.count("a value: ms") == 3 and "Traceback" not in done.stderr
    assert "| wrong | failed | 2 is not 3 |" in done.stdout


def test_a_process_that_cannot_be_killed_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one in a call of the GPU's driver that does not return."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    running = SessionProcess(["tests.support.fake_measurements:Quick", str(tmp_path)], environment, tmp_path / "log")
    assert running.ask("one", 60)["row"]["state"] == "ok"
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", lambda *_: None)
        patch.setattr(process, "kill_descendants", lambda: None)
        patch.setattr(process, "_ORDERLY_END_S", 0.2)
        running.kill()
    assert running._process.poll() is None
    running._process.kill()
    running._process.wait()


LINE = json.dumps({**others()[0], "name": "one"})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (LINE[:40], "not JSON"),
        (LINE.replace('"name"', '"title"'), "no 'name'"),
        (LINE.replace('"ok"', '"done"'), "'state' is 'done', not ok, failed or skipped"),
        (LINE.replace('"seconds": 1.0', '"seconds": "1 s"'), "'seconds' is '1 s'"),
        (LINE.replace("{}", '{"a value": [1.5]}', 1), "figure 'a value' is neither a number nor a text"),
        ("[]", "not an object"),
        ("", "not JSON"),
    ],
)
def test_an_invalid_line_of_results_is_named(line: str, message: str, tmp_path: Path) -> None:
    (path := tmp_path / "results.jsonl").write_text(f"{LINE}\n{line}\n{LINE}\n")
    with pytest.raises(DataError, match=f"results.jsonl:2: is no result: {re.escape(message)}"):
        read_rows(path)


def test_an_invalid_line_of_results_is_one_error_of_each_command(call: Call, tmp_path: Path) -> None:
    """In the work folder, in --done, and where the table is written."""
    (tmp_path / "work").mkdir()
    place, earlier = tmp_path / "work/results.jsonl", tmp_path / "earlier.jsonl"
    place.write_text(f"{LINE}\n{LINE[:40]}\n")
    ends = [call("one")]
    write = [sys.executable, "bench/gpu/table.py", place, "--json", tmp_path / "gpu.json"]
    ends.append(subprocess.run(write, cwd=ROOT, capture_output=True, text=True))
    place = place.rename(earlier)
    ends.append(call("one", "--done", str(earlier)))
    for done, named in zip(ends, ("work/results.jsonl:2", "work/results.jsonl:2", "earlier.jsonl:2"), strict=True):
        assert done.returncode == 1 and f"{tmp_path}/{named}" in done.stderr and done.stderr.count("\n") == 1
    assert calls(tmp_path / "work") == []


def test_results_of_a_rehearsal_do_not_stand_for_measurements(tmp_path: Path) -> None:
    (tmp_path / "rehearsed.jsonl").write_text(LINE)
    with pytest.raises(DataError, match=r"is a result of a rehearsal"):
        seed(tmp_path / "work", tmp_path / "rehearsed.jsonl", rehearse=False)


def test_numbers_of_any_type_are_figures() -> None:
    found = plain({"numpy": np.float32(1.5), "torch": torch.tensor(2), "bool": True, "far": np.inf, "text": "yes"})
    assert json.loads(json.dumps(found)) == {"numpy": 1.5, "torch": 2.0, "bool": 1.0, "far": None, "text": "yes"}


def test_a_work_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = subprocess.run(
        [*FAKES, "--rehearse", "--work", tmp_path / "file/work"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "choose another with --work" in done.stderr


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "ten"])
@pytest.mark.parametrize("option", ["--budget", "--spent", "--call-seconds"])
def test_limits_are_seconds(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_options([f"{option}={value}"], SESSIONS)
    assert f"argument {option}: invalid seconds" in capsys.readouterr().err


def test_the_work_folder_is_not_what_comes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for out in (tmp_path, tmp_path / "work"):
        with pytest.raises(SystemExit):
            read_options(["--work", str(tmp_path / "work"), "--out", str(out)], SESSIONS)
        assert f"--out {out} holds --work" in capsys.readouterr().err


def test_a_missing_gpu_is_reported() -> None:
    variables = {**os.environ, "PATH": "/nonexistent"}
    done = subprocess.run([*FAKES, "one"], cwd=ROOT, capture_output=True, text=True, env=variables)
    assert done.returncode == 3 and "--rehearse runs on a CPU" in done.stderr and done.stderr.count("\n") == 1


def test_an_unknown_measurement_is_named() -> None:
    done = subprocess.run([*FAKES, "--rehearse", "onse"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "unknown measurement onse; choose from: one wrong" in done.stderr


def test_results_of_an_earlier_machine_are_not_measured_again(call: Call, tmp_path: Path) -> None:
    done = tmp_path / "earlier.jsonl"
    done.write_text("".join(json.dumps({**row}) + "\n" for row in others()))
    call("--done", str(done), "--budget=900")
    assert calls(tmp_path / "work") == ["one", "wrong", "two", "wrong"]


def test_measurements_that_failed_on_an_earlier_machine_are_repeated(call: Call, tmp_path: Path) -> None:
    """What broke it may have been repaired. The last result of a measurement counts."""
    done = tmp_path / "earlier.jsonl"
    bad = {**OK, "state": "failed", "reason": "2 is not 3"}
    earlier = [{"name": name, **bad} for name in ("two", "two", "one")]
    earlier += [{"name": "one", **OK}, {"name": "late", **OK}, {"name": "late", **bad}]
    done.write_text("".join(json.dumps(row) + "\n" for row in [*others()[:-1], *earlier]))
    call("--done", str(done), "--budget=900")
    assert calls(tmp_path / "work") == ["wrong", "two", "late", "wrong"]


def test_invalid_results_of_an_earlier_machine_are_named(call: Call, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a text\n")
    (tmp_path / "empty").touch()
    for name in ("text", "empty", "nowhere"):
        done = call("--done", str(tmp_path / name))
        assert done.returncode == 1 and "no result" in done.stderr and "Traceback" not in done.stderr


def piece(stage: Path, name: str, package: str, *files: str) -> str:
    """An archive of one package; returns its line of SUMS."""
    source = stage.parent / f"source-{name}"
    (source / package).mkdir(parents=True)
    for each in ("__init__.py", *files):
        (source / package / each).write_text("")
    script = source / package / "run.sh"
    script.write_text("true")
    script.chmod(0o755)
    stage.mkdir(exist_ok=True)
    with tarfile.open(stage / f"{name}.tar.xz", "w:xz") as tar:
        tar.add(source / package, package)
    return f"{hashlib.sha256((stage / f'{name}.tar.xz').read_bytes()).hexdigest()}  {name}.tar.xz\n"


def test_measurements_wait_for_the_archive_that_they_need(call: Call, tmp_path: Path) -> None:
    stage = tmp_path / "stage"
    sums = piece(stage, "trainer", "another") + piece(stage, "engine", "package_of_a_tree")
    (stage / "SUMS").write_text(sums)
    (stage / "engine.tar.xz").rename(tmp_path / "later.tar.xz")
    call("--stage", str(stage), "lacks", "late")
    first = {row["name"]: row for row in rows(tmp_path / "out/results.jsonl")}
    assert first["late"]["state"] == "ok"
    assert first["lacks"]["reason"] == "needs package_of_a_tree; engine.tar.xz is still to come"
    (stage / "trainer.tar.xz").unlink()
    (tmp_path / "later.tar.xz").rename(stage / "engine.tar.xz")
    call("--stage", str(stage), "lacks")
    assert states(tmp_path / "out/results.jsonl")["lacks"] == "ok"
    call("lacks")
    assert calls(tmp_path / "work").count("lacks") == 2, "the tree stays, without the option, too"
    site = tmp_path / "work/site"
    assert Tree(site).paths() == [site / "trainer", site / "engine"], "in the order of SUMS"
    assert os.access(site / "trainer/another/run.sh", os.X_OK)


def on_gpu(tmp_path: Path, *options: str, used: str = "0", zeros: str = "pass") -> subprocess.CompletedProcess[str]:
    """A call without --rehearse on a machine with a GPU, as its tools and torch show it."""
    programs, modules = tmp_path / "programs", tmp_path / "modules"
    for folder in (programs, modules):
        folder.mkdir(exist_ok=True)
    (programs / "nvidia-smi").write_text(f"#!/bin/sh\necho 'NVIDIA H200, {used}'\n")
    (programs / "nvidia-smi").chmod(0o755)
    (modules / "torch.py").write_text(f"def zeros(*_, device):\n    {zeros}\n")
    arguments = command(tmp_path, tmp_path / "out", *options)
    arguments.remove("--rehearse")
    path = os.pathsep.join(map(str, [modules, ROOT]))
    variables = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": path}
    return subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, env=variables)


def test_on_the_machine_archives_of_earlier_calls_do_not_count(tmp_path: Path) -> None:
    """They stay in the stage folder there, beside the one that this call brings."""
    stage = tmp_path / "stage"
    sums = piece(stage, "trainer", "another") + piece(stage, "engine", "package_of_a_tree")
    (stage / "SUMS").write_text(sums)
    done = on_gpu(tmp_path, "--stage", str(stage), f"--mib-in={REPOSITORY_MIB}", "lacks")
    assert done.returncode == 0 and "in use already" not in done.stderr, done.stderr
    assert states(tmp_path / "out/results.jsonl") == {"lacks": "ok"}
    assert rows(tmp_path / "out/results.jsonl")[0]["device"] == "NVIDIA H200"


@pytest.mark.parametrize(
    ("zeros", "message"),
    [
        ("raise RuntimeError('No CUDA GPUs are available')", "RuntimeError: No CUDA GPUs are available"),
        (
            "raise RuntimeError('busy or unavailable\\nCompile with another')",
            "RuntimeError: busy or unavail",
        ),
        ("import os; os._exit(9)", "no reason given"),
    ],
)
def test_a_gpu_that_torch_cannot_use_fails_no_measurement(zeros: str, message: str, tmp_path: Path) -> None:
    """Each would fail twice, and the next call would try none of them."""
    done = on_gpu(tmp_path, "one", zeros=zeros)
    assert done.returncode == NO_GPU and f"cannot be used by {sys.executable}: {message}" in done.stderr
    assert done.stderr.count("\n") == 1 and calls(tmp_path / "work") == []
    assert on_gpu(tmp_path, "one").returncode == 0


def test_a_gpu_that_takes_long_to_answer_is_part_of_the_call(tmp_path: Path) -> None:
    """Else the call would end after its limit, which kills it."""
    on_gpu(tmp_path, "--call-seconds=14", "one", zeros="import time; time.sleep(3)")
    assert calls(tmp_path / "work") == []
    assert rows(tmp_path / "out/results.jsonl")[0]["reason"] in [
        f"takes about 2 s, and {left} s are left" for left in (0, 1)
    ]


@pytest.mark.parametrize(("used", "reported"), [("140000", True), ("500", False), ("[N/A]", False)])
def test_a_gpu_used_by_another_process_is_reported(used: str, reported: bool, tmp_path: Path) -> None:
    done = on_gpu(tmp_path, "one", used=used)
    assert done.returncode == 0 and ("NVIDIA H200: 140,000 MiB are in use already" in done.stderr) == reported


def test_archives_for_another_python_are_not_taken(call: Call, tmp_path: Path) -> None:
    """What imports them would fail twice; so it waits for a call with the right one."""
    stage, name = tmp_path / "stage", "core.cpython-35m-x86_64-linux-gnu.so"
    (stage / "SUMS").parent.mkdir()
    (stage / "SUMS").write_text(piece(stage, "engine", "package_of_a_tree", name))
    done = call("--stage", str(stage), "lacks")
    assert f"holds {name}, not for this Python" in done.stderr and states(tmp_path / "out/results.jsonl") == {
        "lacks": "skipped"
    }
    own = f"core{sysconfig.get_config_var('EXT_SUFFIX')}"
    (stage / "SUMS").write_text(piece(stage, "recovers", "package_of_a_tree", own))
    assert call("--stage", str(stage), "lacks").returncode == 0


def test_a_broken_archive_keeps_no_other_from_being_taken(tmp_path: Path) -> None:
    """Several may lie there, of earlier calls."""
    stage = tmp_path / "stage"
    sums = "".join(piece(stage, name, f"package_{name}") for name in ("first", "second", "third"))
    (stage / "SUMS").parent.mkdir(exist_ok=True)
    (stage / "SUMS").write_text(sums)
    for name in ("first", "third"):
        archive = stage / f"{name}.tar.xz"
        archive.write_bytes(archive.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"first.tar.xz: .*checksum.*third.tar.xz: .*checksum"):
        Tree(tmp_path / "site").take_in(stage)
    assert Tree(tmp_path / "site").paths() == [tmp_path / "site/second"]


def test_a_broken_archive_costs_what_needs_it_alone(call: Call, tmp_path: Path) -> None:
    stage = tmp_path / "stage"
    (stage.mkdir(), (stage / "SUMS").write_text(piece(stage, "engine", "package_of_a_tree")))
    whole = (stage / "engine.tar.xz").read_bytes()
    (stage / "engine.tar.xz").write_bytes(whole[:-8] + bytes(8))
    done = call("--stage", str(stage), "lacks", "late")
    assert "its checksum is not the one in SUMS" in done.stderr and "Traceback" not in done.stderr
    assert states(tmp_path / "out/results.jsonl") == {"lacks": "skipped", "late": "ok"}


def test_archives_that_cannot_be_taken_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no SUMS"):
        Tree(tmp_path / "site").take_in(tmp_path)
    stage = tmp_path / "stage"
    stage.mkdir()
    (stage / "engine.tar.xz").write_bytes(b"no archive")
    (stage / "SUMS").write_text(f"{hashlib.sha256(b'no archive').hexdigest()}  engine.tar.xz\n")
    with pytest.raises(DataError, match="cannot be unpacked"):
        Tree(tmp_path / "site").take_in(stage)
    assert Tree(tmp_path / "site").paths() == []


def test_processes_that_cannot_compile_cost_no_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, site = tmp_path / "stage", tmp_path / "site"
    sums = piece(stage, "engine", "package_of_a_tree")
    (stage / "SUMS").write_text(sums)
    monkeypatch.setattr(tree.sys, "executable", "/nonexistent")
    Tree(site).take_in(stage)
    assert Tree(site).paths() == [site / "engine"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_call_that_ends_while_packages_are_compiled_leaves_no_process(
    number: signal.Signals, call: Call, tmp_path: Path
) -> None:
    """What stays holds the call's output, for whose end the machine may wait."""
    stage = tmp_path / "stage"
    sums = piece(stage, "engine", "package_of_a_tree", *(f"module_{index}.py" for index in range(500)))
    (stage / "SUMS").write_text(sums)
    process = started_call(tmp_path, "--stage", str(stage), "lacks", until="site/engine")
    found: list[psutil.Process] = []
    while not found:
        assert process.poll() is None, "it ended before its packages were seen to be compiled"
        found = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.001)
    process.send_signal(number)
    _, output = process.communicate(timeout=120)
    assert not psutil.wait_procs(found, timeout=120)[1]
    assert number is signal.SIGKILL or "ended by SIGTERM; the next call goes on" in output
    assert call("--stage", str(stage), "lacks").returncode == 0


def test_half_of_an_archive_does_not_stay_on_the_disk(tmp_path: Path) -> None:
    stage, site = tmp_path / "stage", tmp_path / "site"
    (tmp_path / "package").mkdir()
    (tmp_path / "package/library.so").write_bytes(np.random.default_rng(0).bytes(10**6))
    stage.mkdir()
    with tarfile.open(archive := stage / "engine.tar.xz", "w:xz") as tar:
        tar.add(tmp_path / "package", "package")
    archive.write_bytes(half := archive.read_bytes()[: 5 * 10**5])
    (stage / "SUMS").write_text(f"{hashlib.sha256(half).hexdigest()}  engine.tar.xz\n")
    with pytest.raises(DataError, match="cannot be unpacked"):
        Tree(site).take_in(stage)
    assert [each.name for each in site.iterdir()] == ["SUMS"]


@pytest.mark.parametrize(
    "text", ["engine.tar.xz", f"{'0' * 63}  engine.tar.xz", f"{'0' * 64}  ../engine.tar.xz", "\x00"]
)
def test_an_invalid_list_of_checksums_is_named(text: str, call: Call, tmp_path: Path) -> None:
    stage = tmp_path / "stage"
    stage.mkdir()
    (stage / "SUMS").write_text(text)
    with pytest.raises(DataError, match="is no list of checksums"):
        Tree(tmp_path / "site").take_in(stage)


def test_another_tree_replaces_the_one_that_is_there(tmp_path: Path) -> None:
    for number in ("1", "2"):
        stage = tmp_path / number / "stage"
        stage.parent.mkdir()
        (stage / "SUMS").parent.mkdir()
        (stage / "SUMS").write_text(piece(stage, "engine", f"package_{number}"))
        Tree(tmp_path / "site").take_in(stage)
    assert [each.name for each in (tmp_path / "site/engine").iterdir()] == ["package_2"]


def test_a_call_brings_no_more_than_it_may(call: Call, tmp_path: Path) -> None:
    stage = tmp_path / "stage"
    (stage.mkdir(), (stage / "SUMS").write_text(piece(stage, "engine", "package_of_a_tree")))
    done = call("--stage", str(stage), f"--mib-in={REPOSITORY_MIB}", "lacks")
    assert "one archive a call" in done.stderr and calls(tmp_path / "work") == []
    if not shutil.which("git"):
        return
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    size = sum(
        (ROOT / os.fsdecode(each)).stat().st_size for each in tracked if each and (ROOT / os.fsdecode(each)).exists()
    )
    assert size <= REPOSITORY_MIB * 2**20


def test_all_measurements_exist_and_no_estimate_exceeds_its_limit() -> None:
    for session in SESSIONS:
        module, _, name = session.location.partition(":")
        tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
        (cls,) = (each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name)
        methods = {each.name for each in cls.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert {each.name for each in session.measurements} <= methods
    names = [each.name for each in measured(SESSIONS)]
    assert len(set(names)) == len(names)
    for session in SESSIONS:
        for each in session.measurements:
            assert each.seconds < each.limit and session.start + each.seconds < 600 - MARGIN_S


def running_sessions(driver: int) -> list[psutil.Process]:
    found = []
    for each in psutil.Process(driver).children():
        with suppress(psutil.NoSuchProcess):  # the driver has other children, which end at once
            found += [each] * ("bench.gpu.child" in each.cmdline())
    return found


@pytest.mark.long
def test_the_measurements_are_rehearsed_in_calls_that_are_cut_off(tmp_path: Path) -> None:
    """All of them on a CPU. The first call's process is killed, then the call; the second has no time; the third does
    the rest. The output folder is emptied before each."""
    need_vllm()
    work, out = tmp_path / "work", tmp_path / "out"
    earlier = tmp_path / "earlier.jsonl"
    elsewhere = ("trl", "delta_nets")  # minutes on a CPU, and none of ours; needs fla-core
    earlier.write_text("".join(json.dumps({"name": name, **OK}) + "\n" for name in elsewhere))
    call = [sys.executable, "bench/gpu/short.py", "--rehearse", "--work", str(work), "--out", str(out)]
    call.append(f"--done={earlier}")

    def found() -> dict[str, str]:
        assert len(list(out.iterdir())) <= 8
        return states(out / "results.jsonl")

    with (tmp_path / "log").open("w") as log:
        first = subprocess.Popen(call, cwd=ROOT, stdout=log, stderr=log)
    while not (out / "results.jsonl").exists() or "ceilings" not in found():
        assert first.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.05)
    (session,) = running_sessions(first.pid)
    session.kill()
    while found().get("losses") != "ok":
        assert first.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.2)
    first.kill()
    first.wait()
    before = dict.fromkeys((*elsewhere, "ceilings", "kernels", "losses"), "ok")
    assert found() == {**before, "gradients": "failed"}
    shutil.rmtree(out)
    second = subprocess.run([*call, "--call-seconds=20"], cwd=ROOT, capture_output=True, text=True)
    assert second.returncode in (0, SPENT), second.stderr
    assert {name for name, state in found().items() if state == "ok"} == {*before}
    assert found()["start"] == found()["step"] == "skipped" and "s are left |" in second.stdout
    shutil.rmtree(out)
    untimed = ("--spent=0", "--budget=3000", "--call-seconds=3000")
    third = subprocess.run([*call, *untimed], cwd=ROOT, capture_output=True, text=True)
    assert third.returncode == 0, third.stderr
    assert found() == {each.name: "ok" for each in measured(SESSIONS)}
    assert third.stdout == (out / "table.md").read_text() + "\n"
    figures = {row["name"]: row["figures"] for row in rows(out / "results.jsonl")}
    assert figures["sync"]["log-probs of perturbed weights before the sync: nats"] > 0.01
    assert figures["sync"]["and after it: nats"] < 1e-4
    assert figures["step"]["time/step_s"] > 0 and figures["step"]["response_length/mean"] == 8


STUB = f"""#!{sys.executable}
import pathlib, sys, time
overrides = dict(word.split("=", 1) for word in sys.argv if "=" in word)
run = pathlib.Path(overrides["trainer.default_local_dir"], overrides["trainer.experiment_name"])
run.mkdir(parents=True)  # fails where an earlier run was left
assert overrides["trainer.preflight"] == "false"
lines = ['{{"step": %d, "time/step_s": %d}}\\n' % (step, step) for step in (1, 2)]
(run / "metrics.jsonl").write_text("".join(lines))
if overrides["then"] == "hang":
    time.sleep(600)
sys.exit(overrides["then"] == "fail")
"""


@pytest.mark.long
def test_a_run_that_is_cut_off_gives_the_steps_that_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.gpu import runs

    (tmp_path / "python").write_text(STUB)
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(runs.sys, "executable", str(tmp_path / "python"))
    run = runs.Runs(Place(tmp_path))._run
    assert [row["step"] for row in run("step", ["then=end"])] == [1, 2]
    assert [row["step"] for row in run("step", ["then=hang"], 10.0)] == [1, 2], "an earlier run is removed"
    with pytest.raises(UnexpectedError, match="exit code 1") as failed:
        run("step", ["then=fail"])
    assert failed.value.figures == {"time/step_s": 2, "steps": 1}, "a run that fails at its end"


def test_a_step_without_a_finite_value_costs_no_other_figure() -> None:
    """metrics.jsonl has null for NaN."""
    from bench.gpu import runs

    steps = [{"step": 1, "time/step_s": 9.0}]
    steps += [
        {"step": step, "time/step_s": step, "perf/mfu": mfu, "engine/x": None} for step, mfu in ((2, None), (4, 0.5))
    ]
    assert runs._medians(steps) == {"perf/mfu": 0.5, "time/step_s": 3.0, "steps": 2}
    assert runs._largest(steps, "time/step_s") == 9.0
    assert np.isnan([runs._largest(steps, name) for name in ("perf/mfu", "engine/x", "nowhere")]).all()


def test_a_process_that_cannot_be_started_costs_its_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process.sys, "executable", "/nonexistent")
    with pytest.raises(DiedError, match=r"its process cannot be started .*No such file"):
        SessionProcess(["x:Y", str(tmp_path)], {}, tmp_path / "log")


def test_a_rehearsal_has_a_work_folder_of_its_own() -> None:
    real, rehearsed = (read_options(argv, SESSIONS).work for argv in ([], ["--rehearse"]))
    assert real != rehearsed and real.parent == rehearsed.parent
