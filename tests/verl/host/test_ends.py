"""Ends of real runs: signals, crashes, full disks, closings that hang. What is printed, what is left, what goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console

from tests.conftest import ROOT
from tests.support.every import every
from tests.support.local_run import local_fit, local_trainer
from tests.support.tiny import MINI, run_overrides
from tests.verl.checkpoint.test_checkpoint import on_a_small_disk
from tests.verl.trainer.test_run import final_weights, rows, run, start_code
from toolrl.analysis.collapse.collapse import CollapseWatch
from verl.build.run import load_inputs
from verl.checkpoint.checkpoint import CheckpointStore
from verl.checkpoint.crash import crash_reported
from verl.checkpoint.state import find_saved
from verl.config.commands import TRAIN
from verl.config.load import load_config
from verl.data.tasks import TaskCursor, TaskStream
from verl.errors import DataError
from verl.host import signals
from verl.host.files import check_temporary
from verl.host.signals import Ended, ending_on_signals
from verl.single_controller.group import WorkerError
from verl.tracking.timers import PhaseTimer
from verl.trainer.cli import CliArgs, run_cli

# In slices: a signal just before a sleep is handled after it.
WAITS = """
import sys, time
from verl.config.commands import TRAIN
from verl.trainer.cli import run_cli
def wait(argv, console):
    print("waiting", flush=True)
    for _ in range(1000):
        time.sleep(0.1)
"""
CODES = {
    signal.SIGTERM: (143, "terminated: "),
    signal.SIGHUP: (129, "hung up: "),
    signal.SIGINT: (130, "interrupted: "),
}


def ready(process: subprocess.Popen[str], line: str = "waiting\n") -> None:
    assert process.stdout is not None
    while (output := process.stdout.readline()) != line:
        assert output, "it ended"


def ended(process: subprocess.Popen[str], seconds: float) -> str:
    output, _ = process.communicate(timeout=seconds)
    return output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_scheduler_ends_a_command_like_ctrl_c(number: signal.Signals) -> None:
    process = start_code(WAITS + "sys.exit(run_cli([], '', TRAIN, wait))")
    ready(process)
    process.send_signal(number)
    output = ended(process, 60)
    code, word = CODES[number]
    assert process.returncode == code and word in output and f"{number.name}: shutting down" in output, output
    assert len(output.splitlines()) <= 4


def test_signals_ignored_by_nohup_stay_ignored() -> None:
    process = start_code(
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        + WAITS
        + "sys.exit(run_cli([], '', TRAIN, wait))"
    )
    ready(process)
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.send_signal(signal.SIGTERM)
    assert "terminated: " in ended(process, 60) and process.returncode == 143


def test_a_terminal_that_is_gone_does_not_stop_the_end() -> None:
    """Every write to it after the hang-up is an error."""
    code = (
        WAITS
        + """
import os
def save(argv, console):
    try:
        wait(argv, console)
    finally:
        print("written to a terminal that is gone", flush=True)
        open(sys.argv[1], "w").write("saved")
sys.exit(run_cli([], '', TRAIN, save))
"""
    )
    controller, terminal = os.openpty()
    out = Path(f"/tmp/ends-{os.getpid()}")
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(out)], cwd=ROOT, stdin=terminal, stdout=terminal, stderr=terminal
    )
    os.close(terminal)
    try:
        with open(controller, "rb", closefd=False) as lines:  # whole: a line that is being written would fail
            assert lines.readline().strip() == b"waiting"
        os.close(controller)
        process.send_signal(signal.SIGHUP)
        assert process.wait(60) == 129 and out.read_text() == "saved"
    finally:
        out.unlink(missing_ok=True)


KEPT = """
import os, signal, sys, time
from pathlib import Path
from verl.config.commands import TRAIN
from verl.host.lock import alone_in
from verl.host.signals import kept_signals
from verl.trainer.cli import run_cli
def start():  # as Ray does
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
def end(seconds=0.5):
    os.kill(os.getpid(), signal.{signal})
    time.sleep(seconds)
def run(argv, console):
    with alone_in(Path(sys.argv[1])):
        assert len(os.listdir("/proc/self/task")) > 1  # the kernel gives the signal to a thread that does not block it
        with kept_signals():
            {work}
            print("waited", flush=True)
        print("went on", flush=True)
        return 0
"""


@pytest.mark.long
@pytest.mark.parametrize("work", ["end()", "end(); start()", "start(); end()", "start(); end(0.0)"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_a_library_starts_ends_the_command_in_order(
    work: str, number: signal.Signals, tmp_path: Path
) -> None:
    source = KEPT.format(work=work, signal=number.name) + "sys.exit(run_cli([], '', TRAIN, run))"
    process = start_code(source, str(tmp_path))
    output = ended(process, 60)
    code, word = CODES[number]
    assert process.returncode == code and word in output and f"{number.name}: shutting down" in output, output
    assert "went on" not in output
    if number == signal.SIGHUP or not work.startswith("start"):  # of which the library's handler knows nothing
        assert output.startswith("waited\n")


HANGS = """
import os, psutil, signal, subprocess, sys, threading, time
from verl.config.commands import TRAIN
from verl.trainer import cli as command
from verl.checkpoint import deadline
from verl.host.scratch import scratch_folder
from verl.checkpoint.crash import crash_reported
from pathlib import Path
deadline.SHUTDOWN_S = 2.0
def watcher_of(folder):
    (found,) = (each.pid for each in psutil.Process().children() if str(folder) in each.cmdline())
    return found
def run(argv, console):
    with scratch_folder() as folder:
        child = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL)
        child.send_signal(signal.SIGSTOP)
        try:
            with crash_reported(Path(sys.argv[1])):
                print(child.pid, folder, flush=True)
                {work}
        finally:
            {hang}
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("work", "hang", "code"),
    [
        ("time.sleep(100)", "child.wait()", 143),
        ("time.sleep(100)", "time.sleep(1000)", 143),
        ("raise RuntimeError('the cause')", "child.wait()", 1),
        ("raise RuntimeError('the cause')", "threading.Thread(target=time.sleep, args=(1000,)).start()", 1),
        ("raise RuntimeError('the cause')", "os.kill(watcher_of(folder), signal.SIGSTOP)", 1),
        ("reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 1); console.print('a')", "child.wait()", 141),
    ],
)
def test_a_hanging_shutdown_is_cut_short_and_leaves_nothing(work: str, hang: str, code: int, tmp_path: Path) -> None:
    source = HANGS.format(work=work, hang=hang) + "sys.exit(command.run_cli([], '', TRAIN, run))"
    process = start_code(source, str(tmp_path))
    assert process.stdout is not None
    pid, folder = process.stdout.readline().split()
    child = psutil.Process(int(pid))
    if code == 143:
        process.send_signal(signal.SIGTERM)
    output = ended(process, 60)
    assert process.returncode == code and (code == 141 or "hanging processes were killed" in output), output
    assert ("RuntimeError: the cause" in output) == (code == 1)
    child.wait(60)
    assert not Path(folder).exists()  # its watcher holds standard error until it has tidied up


UNBUILT = """
import sys, time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from verl.config.load import load_config
from verl.config.commands import TRAIN
from verl.tracking.console import Display
from verl.build import run as build
from verl.trainer import cli as command
from verl.checkpoint import deadline
deadline.SHUTDOWN_S = deadline.REGULAR_SHUTDOWN_S = 2.0
def fail(*_):
    raise RuntimeError("the cause")
build.Cluster = SimpleNamespace(start=lambda *_: nullcontext(SimpleNamespace(num_gpus=0)))
build.build_scorer = lambda *_: nullcontext()
build.start_workers = lambda *_: SimpleNamespace(trainer=None, close=lambda: time.sleep(1000))
build.build_trainer = fail
def run(argv, console):
    config = load_config(sys.argv[2:])
    with build.start_run(config, build.load_inputs(config), Path(sys.argv[1]), Display(None, console)):
        return 0
sys.exit(command.run_cli([], "", TRAIN, run))
"""


@pytest.mark.long
def test_a_run_that_cannot_be_built_has_failed_even_if_its_end_hangs(model: Path, tmp_path: Path) -> None:
    process = start_code(UNBUILT, str(tmp_path), *run_overrides(model, tmp_path, "hf", 1))
    output = ended(process, 120)
    assert process.returncode == 1, output
    assert "RuntimeError: the cause" in output and "hanging processes were killed" in output, output


def test_a_crash_is_a_paragraph_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(arguments: CliArgs, console: Console) -> int:
        with crash_reported(tmp_path), crash_reported(tmp_path, lambda: "It failed in step 3, update."):
            try:
                raise LookupError("\n".join(map(str, range(100))))
            except LookupError as error:
                raise WorkerError("trainer rank 0 of 1 died during save\n" + 100 * "more\n") from error

    assert run_cli([], "", TRAIN, fail) == 1
    output = capsys.readouterr().out
    (path,) = (tmp_path / "logs").glob("crash-*.txt")
    assert len(output.splitlines()) <= 25 and "Traceback (" not in output
    assert output.startswith("WorkerError: trainer rank 0 of 1 died during save\n") and "more lines" in output
    assert output.endswith(f"It failed in step 3, update.\nTracebacks and the ends of the workers' logs: {path}\n")
    assert path.read_text().startswith("WorkerError: trainer rank 0 of 1 died during save\n\ncommand: ")
    assert "LookupError: 0\n1\n" in path.read_text() and "\n99\n" in path.read_text()


def test_any_error_of_a_run_is_a_paragraph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(arguments: CliArgs, console: Console) -> int:
        with crash_reported(tmp_path / "file" / "run"):
            raise LookupError("what users' code raises")

    (tmp_path / "file").write_text("")
    assert run_cli([], "", TRAIN, fail) == 1
    output = capsys.readouterr().out
    assert output.startswith("LookupError: what users' code raises\n") and "are not kept: " in output


def test_an_error_with_a_note_of_its_own_is_reported_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: CliArgs, console: Console) -> int:
        with crash_reported(tmp_path):
            error = LookupError("what users' code raises")
            error.add_note("a user's note")
            raise error

    assert run_cli([], "", TRAIN, fail) == 1
    (path,) = (tmp_path / "logs").glob("crash-*.txt")
    assert capsys.readouterr().out.endswith(f"a user's note\nTracebacks and the ends of the workers' logs: {path}\n")


@pytest.mark.parametrize("place", ["/proc/1", "/nowhere"])
def test_an_unwritable_temporary_folder_is_reported(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_temporary()
    monkeypatch.setenv("TMPDIR", place)
    with pytest.raises(DataError, match=f"{place}.*cannot be written"):
        check_temporary()


@pytest.mark.slow
@pytest.mark.parametrize("place", ["TMPDIR", "outputs"])
def test_a_full_disk_is_one_line_before_anything_starts(place: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    overrides = overrides_of(model, tmp_path / ("disk" if place == "outputs" else "out"), 1)
    script = f"""
import os, sys
from pathlib import Path
disk = Path(sys.argv[1])
(disk / "here").mkdir()
if {place == "TMPDIR"}:
    os.environ["TMPDIR"] = str(disk / "here")
with (disk / "ballast").open("wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(65536))
    except OSError:
        pass
from verl.trainer.main_ppo import main
code = main({overrides!r})
assert "ray" not in sys.modules or not sys.modules["ray"].is_initialized()
print("exit code", code)
"""
    line, code = on_a_small_disk("1m", script, tmp_path / "disk")[-2:]
    assert code == "exit code 2", line
    assert (line.startswith("DataError: ") and "No space left on device" in line) or "No usable temporary" in line


def overrides_of(model: Path, out: Path, steps: int) -> list[str]:
    return [*run_overrides(model, out, "hf", steps), "trainer.save_freq=1000"]


def same_end(one: Path, two: Path) -> None:
    """Metrics without times, and weights."""
    timed = ("time", "perf", "memory")
    kept = [[{k: v for k, v in row.items() if not k.startswith(timed)} for row in rows(out)] for out in (one, two)]
    assert kept[0] == kept[1]
    weights = final_weights(two)
    assert every(torch.equal(weight, weights[name]) for name, weight in final_weights(one).items())


VALIDATED = ("trainer.test_freq=2", f"data.val_files=[{MINI / 'test.parquet'}]")


def learned(model: Path, out: Path, moment: str = "", saving: bool = True) -> list[str]:
    """Three steps in this process, or those that are left of them; a signal comes in the second step's `moment`."""
    config = load_config(run_overrides(model, out, "hf", 3))
    calls: list[str] = []

    def signaled(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls.append(name)
            if (moment == name and calls.count(name) == 2) or moment == "start":
                os.kill(os.getpid(), signal.SIGTERM)
            return plain(*args)

        return call

    with local_trainer(config) as trainer:
        fit = local_fit(trainer, config, CollapseWatch([]))
        fit.checkpointing.saved = saved = find_saved(fit.checkpointing.store, "main_ppo", {})
        if saved is not None:
            cursor = TaskCursor(**saved.state["trainer"]["rollouts"]["data"])
            rollouts = trainer.rollouts
            rollouts.tasks = TaskStream(load_inputs(config).train, config.data.weights, config.trainer.seed, cursor)
        fit.settings = replace(fit.settings, save_on_signal=saving, test_freq=1)
        fit.validator = SimpleNamespace(
            sets={"val": ()}, rollouts=signaled("validation", no_rollouts), metrics=lambda *_: {"val/val/total": 1.0}
        )
        trainer.rollouts.take = signaled("rollout", trainer.rollouts.take)
        trainer.learner.learn = signaled("update", trainer.learner.learn)
        asyncio.run(fit.run())
    return calls


async def no_rollouts(_: int) -> dict[str, object]:
    await asyncio.sleep(0.01)
    return {}


@pytest.mark.long
@pytest.mark.parametrize("moment", ["rollout", "update", "validation"])
def test_a_signal_saves_the_last_whole_step(moment: str, model: Path, tmp_path: Path) -> None:
    """In the second step: a rollout or a validation is given up and comes again, an update is finished."""
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    calls = learned(model, straight)
    assert calls == ["validation", *3 * ["rollout", "update", "validation"]]
    with pytest.raises(Ended, match="The same command resumes") as stopped:
        learned(model, broken, moment)
    step = {"rollout": 1, "update": 2, "validation": 1}[moment]  # the first validation is of step 0
    assert stopped.value.number == signal.SIGTERM and f"saved {broken}" in stopped.value.note
    assert [path.name for path in (broken / "run" / "checkpoints").glob("step-*")] == [f"step-{step:06d}"]
    calls = learned(model, broken)
    given_up = [] if moment == "rollout" else ["validation"]
    assert calls == [*given_up, *(3 - step) * ["rollout", "update", "validation"]]
    same_end(straight, broken)


@pytest.mark.long
@pytest.mark.parametrize("moment", ["rollout", "update"])
def test_without_saving_a_signal_ends_wherever_the_run_is(moment: str, model: Path, tmp_path: Path) -> None:
    announced: list[int] = []
    with pytest.raises(Ended) as stopped, ending_on_signals(announced.append):
        learned(model, tmp_path, moment, saving=False)
    assert stopped.value.number == signal.SIGTERM and announced == [signal.SIGTERM]
    assert not list(tmp_path.rglob("checkpoints/step-*"))


@pytest.mark.long
def test_a_failure_names_its_step_and_the_checkpoint_to_resume_from(model: Path, tmp_path: Path) -> None:
    config = load_config(run_overrides(model, tmp_path, "hf", 3))
    with local_trainer(config) as trainer:
        fit = local_fit(trainer, config, CollapseWatch([]))
        fit.settings = replace(fit.settings, save_freq=1)
        trainer.learner.timer = PhaseTimer(fit.display.phase)
        learn = trainer.learner.learn
        trainer.learner.learn = lambda batch, step, *more: 1 / 0 if step == 1 else learn(batch, step)
        with pytest.raises(ZeroDivisionError) as failed:
            asyncio.run(fit.run())
    where, file = failed.value.__notes__
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000001"
    assert where == f"It failed in step 2 of 3, rollout. The same command resumes from {checkpoint}"
    assert file.startswith(f"Tracebacks and the ends of the workers' logs: {tmp_path}/run/logs/crash-")


@pytest.mark.long
def test_before_the_first_step_there_is_nothing_to_save(model: Path, tmp_path: Path) -> None:
    with pytest.raises(Ended, match="no step was trained"):
        learned(model, tmp_path, "start")
    assert not list(tmp_path.rglob("checkpoints/step-*"))


@contextmanager
def family_of(process: subprocess.Popen[str]) -> Iterator[None]:
    """What the process has started is gone at the end of the block."""
    family = psutil.Process(process.pid).children(recursive=True)
    yield
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []


@pytest.fixture(scope="module")
def unbroken(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unbroken")
    run([*overrides_of(model, out, 4), *VALIDATED])
    return out


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["rollout", "update", "validation"])
@pytest.mark.parametrize("to", ["process", "everybody"])
def test_a_signal_saves_and_the_run_goes_on_bit_for_bit(
    moment: str, to: str, model: Path, unbroken: Path, tmp_path: Path
) -> None:
    """Everybody: as a scheduler that signals every process of a job's cgroup."""
    overrides = [*overrides_of(model, tmp_path, 4), *VALIDATED, "trainer.save_on_signal=true"]
    process = start_code(AT_A_MOMENT, moment, *overrides)
    ready(process, f"at {moment}\n")
    with family_of(process):
        others = psutil.Process(process.pid).children(recursive=True) if to == "everybody" else []
        for each in (*others, psutil.Process(process.pid)):
            each.send_signal(signal.SIGTERM)
        output = ended(process, 150)
    assert process.returncode == 143 and "terminated: saved " in output, output
    assert "Traceback (" not in output and len(output.splitlines()) < 25
    store = CheckpointStore(tmp_path / "run" / "checkpoints", 1, 0)
    assert store.latest(hashes=True).name == {"rollout": "step-000001"}.get(moment, "step-000002")
    run(overrides)
    same_end(unbroken, tmp_path)


AT_A_MOMENT = """
import sys, time
from verl.trainer import learner, validate
from verl.episodes import manager as rollouts
from verl.trainer.main_ppo import main
moment = sys.argv[1]
kinds = {"rollout": rollouts.RolloutManager, "update": learner.Learner, "validation": validate.Validator}
names = {"rollout": "take", "update": "learn", "validation": "run"}
kind, name = kinds[moment], names[moment]
plain, calls = getattr(kind, name), []
def shown(*args, **kwargs):
    calls.append(0)
    if len(calls) == 2:
        print("at", moment, flush=True)
        time.sleep(moment == "update")  # for the signal to come in the middle
    return plain(*args, **kwargs)
setattr(kind, name, shown)
sys.exit(main(sys.argv[2:]))
"""


def test_a_signal_in_the_middle_of_a_print_is_no_failure() -> None:
    def announce(number: int) -> None:
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>")

    def other(number: int) -> None:
        raise RuntimeError("a fault of the display")

    signals._announced(announce, signal.SIGINT)
    with pytest.raises(RuntimeError, match="a fault"):
        signals._announced(other, signal.SIGINT)


class Finalized:
    """A signal arrives while Python collects it."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)
        sum(range(10))


def at_a_finalizer() -> None:
    finalized = Finalized()
    del finalized


def at_a_callback() -> None:
    target = type("Target", (), {})()
    reference = weakref.ref(target, lambda _: signal.raise_signal(signal.SIGINT))
    del target
    assert reference() is None


@pytest.mark.parametrize("moment", [at_a_finalizer, at_a_callback])
def test_a_signal_whose_exception_is_discarded_is_not_lost(moment: Callable[[], None]) -> None:
    announced: list[int] = []
    with pytest.raises(Ended), ending_on_signals(announced.append):
        moment()
        time.sleep(10)
    assert announced == [signal.SIGINT]
