"""What a quarter of an hour on a GPU machine is spent on: measurements in the order of their value, within its limits.

    python bench/gpu/short.py [--stage FOLDER] [NAME ..]    the measurements that have no result yet, or these anew
    python bench/gpu/short.py --rehearse                    the same on a CPU with tiny sizes, which measures nothing

The same command is called until all is measured. The work folder stays on the machine between calls; the output folder
is what comes back from it, and may be emptied before each call. A line of results.jsonl is there as soon as a
measurement has ended; a call may be killed at any time. What failed is tried once more, last, in the call that brings
the last packages. Measurements whose packages are missing wait for a call that brings them (`--stage`), and those whose
process breaks at its start until all others had their turn.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from bench.gpu.ledger import Ledger, report, seed
from bench.gpu.measurements import FAILED, SESSIONS, SKIPPED, Measurement, Session, measured
from bench.gpu.process import DiedError, OverrunError, SessionProcess, adopt_orphans, kill_descendants
from bench.gpu.tree import Tree, carried
from verl.errors import DataError
from verl.host.files import replacing

MARGIN_S = 10.0  # for the last processes to end and the table to be written
PATIENCE = 4  # a CPU may take this many times as long as a GPU
NO_GPU, SPENT = 3, 4  # exit codes beside 0, and 1 for a failed measurement
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_FIND = """import json, sys
from importlib.util import find_spec
print(json.dumps([name for name in sys.argv[1:] if find_spec(name) is None]))"""
_USE_GPU = "import torch; torch.zeros(1, device='cuda')"
_USE_GPU_S = 120.0  # torch is imported from a cold disk
_USED_MIB = 1024  # of the GPU's memory, before anything is measured: more is another process's
_VARIABLES = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # flashinfer is not in the tree
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONUNBUFFERED": "1",
}
_REHEARSED = {"OMP_NUM_THREADS": "1"}  # tiny tensors: other threads would only wait, at full load


class Stopped(BaseException):
    """A signal asked the driver to end."""


class OutOfTimeError(Exception):
    """The call or the budget ends before the measurement does."""


class Driver:
    """One call, which ends with its own limit or with the budget, whatever comes first.

    started: when it began, as `now` has it
    """

    def __init__(self, options: argparse.Namespace, sessions: Sequence[Session], device: str, started: float) -> None:
        self.options = options
        self.sessions = [each for each in sessions if not options.names or _names(each) & set(options.names)]
        self.ledger = Ledger(options.work, options.out, options.files_out, options.names)
        self.tree = Tree(options.work / "site")
        self._device = device
        self._running: tuple[Session, SessionProcess] | None = None
        first = _first_call(options.work, started)
        self._end = min(started + options.call_seconds, first + options.budget - options.spent)

    @property
    def time_left(self) -> float:
        return self._end - now() - MARGIN_S

    def run(self) -> None:
        """Every measurement that is to be done, then once more those that failed."""
        try:
            self.ledger.copy_out()
            self._take_in_tree()
            self._missing = self._missing_modules()
            put_off = self._round(self._to_do(failures=0))
            if not self.tree.missing():  # else what the next call brings is worth more
                self._round(put_off)
                self._round(self._to_do(failures=1))
        finally:
            with _without_signals():
                if self._running:
                    self._running[1].kill()
                kill_descendants()  # a signal may have come while packages were compiled
                self.ledger.write_table([measurement for _, measurement in self._chosen()])
                self._report_given_up()

    def _round(self, to_do: Sequence[tuple[Session, Measurement]]) -> list[tuple[Session, Measurement]]:
        """Try each; returns those that were put off.

        A measurement that breaks a new process may be the first of many: a round loses the start of one process to a
        session, not one for each of its measurements.
        """
        self._end_session()  # what failed before may have left it broken
        broken: list[Session] = []
        put_off = []
        for session, measurement in to_do:
            if any(session is each for each in broken):
                put_off.append((session, measurement))
                if not self._failures(measurement):
                    self._record(measurement, SKIPPED, "waits, because a new process of its session broke")
            elif self._try(session, measurement):
                broken.append(session)
        return put_off

    def _to_do(self, failures: int) -> list[tuple[Session, Measurement]]:
        """What is not done and has failed so often."""
        return [
            (session, each)
            for session, each in self._chosen()
            if not self.ledger.is_done(each.name) and self._failures(each) == failures
        ]

    def _failures(self, measurement: Measurement) -> int:
        return self.ledger.failures(measurement.name)

    def _chosen(self) -> Iterator[tuple[Session, Measurement]]:
        for session in self.sessions:
            for measurement in session.measurements:
                if not self.options.names or measurement.name in self.options.names:
                    yield session, measurement

    def _try(self, session: Session, measurement: Measurement) -> bool:
        """Measure, and record what comes of it. Returns whether it broke a new process."""
        if missing := [each for each in (*session.needs, *measurement.needs) if each in self._missing]:
            to_come = f"; {', '.join(self.tree.missing())} is still to come" if self.tree.missing() else ""
            self._record(measurement, SKIPPED, f"needs {', '.join(missing)}{to_come}")
            return False
        is_running = self._running is not None and self._running[0] is session
        needed = measurement.seconds + (0 if is_running else session.start)
        if needed > self.time_left:
            left = max(0, self.time_left)
            self._record(measurement, SKIPPED, f"takes about {needed:.0f} s, and {left:.0f} s are left")
            return False
        started = now()
        try:
            row = self._ask(session, measurement)
        except OutOfTimeError as error:
            self._record(measurement, SKIPPED, str(error), seconds=now() - started)
            return False
        except (OverrunError, DiedError) as error:
            self._failed(measurement, str(error), seconds=now() - started)
        else:
            if row["state"] == FAILED:
                self._failed(measurement, **row)
            else:
                self._record(measurement, **row)
        return self._running is None and not is_running

    def _ask(self, session: Session, measurement: Measurement) -> dict[str, Any]:
        """What the session's process found. It is started if another one is running, and killed if it broke."""
        limit, start = measurement.limit, session.start
        if self.options.rehearse:
            limit, start = PATIENCE * limit, PATIENCE * start
        if self._running is None or self._running[0] is not session:
            self._end_session()
            self._running = session, self._start(session)
            limit += 2 * start
        process = self._running[1]
        time_left = self.time_left
        is_usable = False
        try:
            answer = process.ask(measurement.name, min(limit, time_left))
            is_usable = answer["is_usable"]
        except OverrunError as error:
            if time_left < limit:
                reason = f"cut off after {time_left:.0f} s, by the end of the call or of the budget"
                raise OutOfTimeError(reason) from error
            raise
        finally:
            if not is_usable:
                process.kill()
                self._running = None
        row: dict[str, Any] = answer["row"]
        return row

    def _start(self, session: Session) -> SessionProcess:
        arguments = [session.location, str(self.options.work)]
        arguments += ["--rehearse"] * self.options.rehearse
        arguments += ["--again"] * any(map(self._failures, session.measurements))
        name = session.location.partition(":")[0].rpartition(".")[2]
        log = self.options.work / "logs" / f"{name}.log"
        return SessionProcess(arguments, self._environment(), log)

    def _report_given_up(self) -> None:
        given_up = [
            each for _, each in self._chosen() if self._failures(each) > 1 and not self.ledger.is_done(each.name)
        ]
        if given_up:
            report(
                f"not tried again by the next call, unless it names them: {' '.join(each.name for each in given_up)}"
            )

    def _end_session(self) -> None:
        if self._running:
            self._running[1].close()
            self._running = None

    def _failed(self, measurement: Measurement, reason: str, **more: Any) -> None:
        self._record(measurement, **{**more, "state": FAILED, "reason": reason})
        logs = sorted((self.options.work / "logs").glob("*.log"), key=lambda path: path.stat().st_mtime)
        if logs:
            self.ledger.add_log(measurement.name, logs[-1])

    def _record(self, measurement: Measurement, state: str, reason: str | None, **more: Any) -> None:
        given = {"figures": {}, "seconds": 0.0, "versions": {}, **more}
        facts = {"device": self._device, "rehearsal": self.options.rehearse, "time": round(time.time(), 1)}
        self.ledger.add({"name": measurement.name, "state": state, "reason": reason, **given, **facts})

    def _take_in_tree(self) -> None:
        """What this call brings; without it, or with a broken one, what is there already is measured.

        On the machine archives of earlier calls may lie beside it: what is there has arrived.
        """
        stage = self.options.stage
        if stage is None:
            return
        if self.options.rehearse and (mib := carried(stage)) > self.options.mib_in:
            report(
                f"{stage}: a call brings {self.options.mib_in:g} MiB, not {mib:.0f}: one archive a call (or --mib-in)"
            )
            return
        try:
            self.tree.take_in(stage)
        except DataError as error:
            report(str(error))

    def _environment(self) -> dict[str, str]:
        paths = [ROOT, *self.tree.paths(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        rehearsed = _REHEARSED if self.options.rehearse else {}
        return {**os.environ, **_VARIABLES, **rehearsed, "PYTHONPATH": os.pathsep.join(map(str, paths))}

    def _missing_modules(self) -> list[str]:
        """Modules that this call's processes lack; a rehearsal does without kernels for GPUs."""
        needs = {each for session, measurement in self._chosen() for each in (*session.needs, *measurement.needs)}
        needs -= {"liger_kernel"} if self.options.rehearse else set()
        command = [sys.executable, "-c", _FIND, *sorted(needs)]
        found = subprocess.run(command, env=self._environment(), capture_output=True, text=True, check=True)
        missing: list[str] = json.loads(found.stdout)
        return missing


def _names(session: Session) -> set[str]:
    return {each.name for each in session.measurements}


def now() -> float:
    """Seconds since the machine started: the clock of a new machine may be set while it measures."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _first_call(work: Path, started: float) -> float:
    """When the first call on this machine began, which may be this one; the time between calls counts, too.

    The work folder may have come from another machine.
    """
    path, boot = work / "began", Path("/proc/sys/kernel/random/boot_id")
    machine = boot.read_text().strip() if boot.exists() else "unknown"
    with suppress(OSError, ValueError):
        there, began = path.read_text().split()
        if there == machine:
            return min(started, float(began))
    try:
        with replacing(path) as unfinished:
            unfinished.write_text(f"{machine} {started}")
    except DataError as error:
        report(f"{error} (the next call counts from its own start)")
    return started


def _lock(work: Path) -> IO[bytes]:
    """A file whose lock this process alone holds, not what it forks. Raises BlockingIOError if another call has it."""
    file = (work / "lock").open("wb")
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def find_gpu() -> str | None:
    """The name of the first GPU. Reports if another process uses it."""
    command = ["nvidia-smi", "--query-gpu=name,memory.used", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    name, _, used = next(iter(found.stdout.splitlines()), "").partition(",")
    if used.strip().isdecimal() and int(used) > _USED_MIB:  # "[N/A]" in some virtual machines
        report(f"{name}: {int(used):,} MiB are in use already; see nvidia-smi, and end what holds them")
    return name or None


def unusable() -> str | None:
    """Why this Python's torch cannot use the GPU: all measurements would fail, and twice. None if it can."""
    command = [sys.executable, "-c", _USE_GPU]
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=_USE_GPU_S, check=True)
    except subprocess.TimeoutExpired:
        return f"no answer within {_USE_GPU_S:.0f} s"
    except subprocess.CalledProcessError as error:
        lines = error.stderr.splitlines()
        named = [line for line in lines if re.match(r"[\w.]+: ", line)]  # the exception; more of its text may follow
        return next(iter(named or lines[-1:]), "no reason given")
    return None


def read_options(argv: Sequence[str] | None, sessions: Sequence[Session]) -> argparse.Namespace:
    known = [each.name for each in measured(sessions)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    parser.add_argument("--budget", type=seconds, default=900, help="seconds from asking for the machine to its end")
    parser.add_argument("--spent", type=seconds, default=120, help="seconds of it before the first call here")
    parser.add_argument("--call-seconds", type=seconds, default=600, help="limit of a call")
    parser.add_argument("--files-out", type=int, default=8, help="files that come back")
    parser.add_argument("--mib-in", type=float, default=64, help="MiB of a rehearsed call, with the repository")
    parser.add_argument("--work", type=Path, help="stays on the machine; outputs/short, or outputs/short-rehearsal")
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT") or None, help="comes back; $OUT or WORK/out")
    parser.add_argument("--stage", type=Path, help="archives of packages that this call brings")
    parser.add_argument("--done", type=Path, help="results.jsonl of an earlier machine, not to be measured again")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU with tiny sizes")
    options = parser.parse_args(argv)
    if unknown := [each for each in options.names if each not in known]:
        parser.error(f"unknown measurement {unknown[0]}; choose from: {' '.join(known)}")
    # a rehearsal's results must not stand for measurements
    default = ROOT / ("outputs/short-rehearsal" if options.rehearse else "outputs/short")
    options.work = (options.work or default).resolve()
    options.out = options.out.resolve() if options.out else options.work / "out"
    if options.work.is_relative_to(options.out):
        parser.error(f"--out {options.out} holds --work {options.work}, and no more than a few files come back")
    return options


def seconds(text: str) -> float:
    """An argparse type."""
    if not 0 <= (number := float(text)) < math.inf:
        raise ValueError
    return number


def main(argv: Sequence[str] | None = None, sessions: Sequence[Session] = SESSIONS) -> int:
    """One call; returns the exit code."""
    started = now()
    options = read_options(argv, sessions)
    device = "cpu, a rehearsal" if options.rehearse else find_gpu()
    if device is None:
        report("needs an NVIDIA GPU, and nvidia-smi shows none; --rehearse runs on a CPU")
        return NO_GPU
    if not options.rehearse and (reason := unusable()):
        report(f"{device} cannot be used by {sys.executable}: {reason}")
        return NO_GPU
    try:
        options.work.mkdir(parents=True, exist_ok=True)
        lock = _lock(options.work)
        if options.done:
            seed(options.work, options.done, options.rehearse)
        driver = Driver(options, sessions, device, started)
    except DataError as error:
        report(str(error))
        return 1
    except BlockingIOError:
        report(f"{options.work}: another call is running there; wait for its end, or choose another with --work")
        return 1
    except OSError as error:
        report(
            f"{options.work}: the work folder cannot be used ({error.strerror or error}); choose another with --work"
        )
        return 1
    with lock:
        return _run(driver)


def _run(driver: Driver) -> int:
    """The exit code."""
    adopt_orphans()
    for each in _SIGNALS:
        if signal.getsignal(each) != signal.SIG_IGN:  # as nohup and background jobs have it
            signal.signal(each, _stop)
    try:
        driver.run()
    except Stopped as error:
        report(f"ended by {error}; the next call goes on")
        return 1
    if driver.time_left <= 0:
        report("the time of the call or of the budget is used up")
        return SPENT
    return 1 if driver.ledger.has_failures() else 0


def _stop(number: int, _: object) -> NoReturn:
    raise Stopped(signal.Signals(number).name)


@contextmanager
def _without_signals() -> Iterator[None]:
    """The end is not interrupted by a second signal."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


if __name__ == "__main__":
    sys.exit(main())
