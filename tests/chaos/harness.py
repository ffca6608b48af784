"""Starts runs, breaks them, and checks what came of it."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.chaos import agent
from tests.chaos.cases import TARGETS, WATCHED, Case, End
from tests.chaos.outcome import metrics, newest, weights
from tests.chaos.parts import points
from tests.chaos.place import GONE_S, Place
from tests.conftest import ROOT
from tests.support.service import free_port, wait_for
from tests.support.tiny import run_overrides, save_tiny_model
from verl.tracking.jsonl import read_jsonl, write_jsonl

STEPS = 3
BROKEN_STEP = 2
PROMPTS, RESPONSES = 4, 2  # of a step
STOPPED_S = 60.0
HEALTH_S = 30.0  # trainer.health_timeout_s
REPORT_S = HEALTH_S + 10.0  # Ray takes some 5 s to report a process that was killed
MAX_LINES = 25
START_S = 400.0  # until a run is where it is to be broken
RUN_S = 500.0  # for a run from start to end
TRACEBACK = "Traceback (most recent call last)"

SETUPS: Mapping[str, Sequence[str]] = {
    "hf": ("rollout.name=hf",),
    "vllm": ("rollout.name=vllm",),
    "tools": (
        "rollout.name=hf",
        "env.name=tool",
        "env.tools=[python_session]",
        "env.tool_call_format=tests.chaos.parts:AlwaysCalls",
        "env.max_tool_calls=1",
        "sandbox.num_workers=1",
    ),
    "env": (
        "rollout.name=hf",
        "env.name=remote",
        "env.tool_call_format=tests.chaos.parts:AlwaysCalls",
        "env.max_tool_calls=1",
    ),
    "agent": (
        "rollout.name=hf",
        "env.name=agent",
        f"env.agent={agent.__file__}:run",
        "env.tool_call_format=toolrl",
    ),
}


@dataclass(frozen=True)
class Baseline:
    """What a run comes to that nothing breaks."""

    folder: Path  # its outputs
    rows: list[dict[str, Any]]
    weights: str
    lines: int  # on its console


@dataclass
class Ended:
    """How a run ended."""

    code: int
    lines: list[tuple[float, str]]  # seconds since it was struck (negative: before), line of the console
    seconds: float  # from the strike to the end

    @property
    def text(self) -> str:
        return "\n".join(line for _, line in self.lines)

    @property
    def printed(self) -> list[str]:
        """Without empty lines."""
        return [line for _, line in self.lines if line.strip()]

    @property
    def after(self) -> list[tuple[float, str]]:
        return [(at, line) for at, line in self.lines if at >= 0 and line.strip()]

    def reported_s(self, pattern: str) -> float | None:
        """When the first line that names the culprit came."""
        return next((at for at, line in self.after if re.search(pattern, line, re.IGNORECASE)), None)


@dataclass
class Result:
    """What is kept of a case."""

    problems: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def need(self, holds: bool, problem: str) -> None:
        if not holds:
            self.problems.append(problem)


class Running:
    """A command that was started in a place."""

    def __init__(self, place: Place, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self.place, self.folder = place, folder
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("reached.json", "go"):
            (folder / name).unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [*place.enter, *command],
            env=place.environment({"CHAOS_DIR": str(folder), **environment}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,
        )
        self._lines: list[tuple[float, str]] = []
        self.struck = time.monotonic()
        self._over = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._watcher = threading.Thread(target=place.watch, args=(self.process.pid, self._over), daemon=True)
        self._reader.start()
        self._watcher.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append((time.monotonic(), line.rstrip()))

    def reached(self) -> dict[str, list[int]]:
        """Wait until it stands at its point: the process ids of every target."""
        self.wait_for((self.folder / "reached.json").exists)
        pids: dict[str, list[int]] = json.loads((self.folder / "reached.json").read_text())
        return pids

    def wait_for(self, there: Callable[[], bool], limit_s: float = START_S) -> None:
        """Until something is there. The run must not end before."""
        deadline = time.monotonic() + limit_s
        while not there():
            assert self.process.poll() is None, f"the run ended with {self.process.returncode} before:\n{self.printed}"
            assert time.monotonic() < deadline, f"not there after {limit_s:g} s:\n{self.printed}"
            time.sleep(0.02)

    @property
    def printed(self) -> str:
        return "\n".join(line for _, line in self._lines[-40:])

    def strike(self, pids: Sequence[int], name: str) -> None:
        """Send the signal; STOP goes to all, and ends after a minute."""
        root = psutil.Process(self.process.pid)
        self.place.note([root, *root.children(recursive=True)])
        self.struck = time.monotonic()
        victims = [each for each in map(_process, pids if name == "STOP" else pids[:1]) if each is not None]
        _send(victims, getattr(signal, f"SIG{name}"))
        if name == "STOP":
            timer = threading.Timer(STOPPED_S, _send, args=(victims, signal.SIGCONT))
            timer.daemon = True
            timer.start()

    def go(self) -> None:
        """Let it go on from its point."""
        (self.folder / "go").touch()

    def ended(self, limit_s: float = RUN_S) -> Ended:
        """Wait for its end; one that does not come is code 124, and everything is killed."""
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = 124
        seconds = time.monotonic() - self.struck
        self._over.set()
        self._watcher.join()
        # What still lives may hold its end of the pipe open. The watcher of a killed controller speaks after its end.
        self._reader.join(GONE_S if code == -signal.SIGKILL else 10.0)
        return Ended(code, [(at - self.struck, line) for at, line in list(self._lines)], seconds)


def _process(pid: int) -> psutil.Process | None:
    """None where it has ended."""
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def _send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    """To those that have not ended; a later process that got the same id is not meant."""
    for each in processes:
        with suppress(psutil.NoSuchProcess):
            each.send_signal(number)


class Lab:
    """What the cases share: the model, the data, and an unbroken run of every setup, made when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model, self.train, self.val = folder / "model", folder / "train.jsonl", folder / "val.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        with self._alone():
            if not self.val.exists():
                save_tiny_model(self.model)
                write_jsonl(self.train, _rows(64))
                write_jsonl(self.val, _rows(4))

    def overrides(self, setup: str, out: Path, urls: Sequence[str] = (), *more: str) -> list[str]:
        """Of the training command."""
        remote = [f"env.options={{urls: [{', '.join(urls)}]}}"] if urls else []
        turns = ["env.max_turn_tokens=16"] if setup in ("tools", "env") else []
        return [
            *run_overrides(self.model, out, "hf", STEPS),
            *SETUPS[setup],
            *remote,
            *turns,
            "reward.name=tests.chaos.parts:reward",
            "reward.max_fault_share=0.5",
            "algorithm.name=grpo",
            "data.max_response_length=48",
            f"data.train_files=[{self.train}]",
            f"data.val_files=[{self.val}]",
            "trainer.val_before_train=false",
            "trainer.save_freq=1",
            "trainer.test_freq=2",
            "trainer.keep_last=5",
            *more,
        ]

    def baseline(self, setup: str) -> Baseline:
        """Made once and kept. What lies in the folder is of the same commit."""
        folder = self.folder / f"baseline-{setup}"
        with self._alone(setup):
            if not (folder / "console.txt").exists():
                shutil.rmtree(folder, ignore_errors=True)
                with place() as where, servers(setup) as urls:
                    ended = self.start(where, self.overrides(setup, folder, urls)).ended()
                assert ended.code == 0, f"the unbroken run failed:\n{ended.text}"
                (folder / "console.txt").write_text("\n".join(ended.printed))
        lines = (folder / "console.txt").read_text().splitlines()
        return Baseline(folder, metrics(folder), weights(folder), len(lines))

    @contextmanager
    def _alone(self, setup: str = "inputs") -> Iterator[None]:
        """Of several processes that run cases one makes what all share; the others wait for it."""
        with (self.folder / f".{setup}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def start(
        self,
        where: Place,
        overrides: Sequence[str],
        point: str = "",
        environment: Mapping[str, str] | None = None,
        to: Path | None = None,
    ) -> Running:
        """The training command, to stand still at `point` where one is named. to: a file for its standard output"""
        stop = {"CHAOS_POINT": point, "CHAOS_STEP": str(BROKEN_STEP)} if point else {}
        command = [sys.executable, "-m", "tests.chaos.run", *overrides]
        if to is not None:
            command = ["sh", "-c", 'exec "$@" >> "$0"', str(to), *command]
        return Running(where, command, {**stop, **(environment or {})}, where.tmp.with_suffix(".talk"))


def _rows(count: int) -> list[dict[str, Any]]:
    return [
        {
            "data_source": "chaos",
            "prompt": [{"role": "user", "content": f"Count to {number}." + " And back." * (number % 3)}],
            "reward_model": {"ground_truth": str(number)},
        }
        for number in range(count)
    ]


@contextmanager
def place(shm_mib: int = 2048) -> Iterator[Place]:
    """A place, of which nothing is left."""
    made = Place(shm_mib)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(made.tmp.with_suffix(".talk"), ignore_errors=True)


@contextmanager
def servers(setup: str) -> Iterator[list[str]]:
    """Two environment servers for the setup that needs them; their URLs."""
    started: list[subprocess.Popen[bytes]] = []
    urls: list[str] = []
    try:
        for _ in range(2 if setup == "env" else 0):
            port = free_port()
            command = [sys.executable, "-m", "toolrl.envs.openenv.server", "--env", "tests.chaos.parts:LookEnv"]
            # no process of the run: it has neither the mark nor the temporary folder of the place
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            started.append(subprocess.Popen([*command, "--port", str(port)], cwd=ROOT, env=environment))
            urls.append(f"http://127.0.0.1:{port}")
        for process, url in zip(started, urls, strict=True):
            wait_for(f"{url}/health", process)
        yield urls
    finally:
        for process in started:
            process.kill()
            process.wait()


def server_pids(urls: Sequence[str]) -> list[int]:
    """The process that listens for the first of them, and all below it."""
    if not urls:
        return []
    port = int(urls[0].rpartition(":")[2])
    listening = [each.pid for each in psutil.net_connections("tcp") if each.laddr and each.laddr.port == port]
    process = psutil.Process(next(pid for pid in listening if pid))
    return [process.pid, *(each.pid for each in process.children(recursive=True))]


def run_case(lab: Lab, case: Case) -> Result:
    """Break a run as the case demands, and check everything."""
    result, unbroken = Result(), lab.baseline(case.setup)
    with place() as where, servers(case.setup) as urls:
        out = where.tmp.with_suffix(".out")
        try:
            overrides = lab.overrides(case.setup, out, urls)
            running = lab.start(where, overrides, case.point)
            pids = {**running.reached(), "environment server": server_pids(urls)}[case.target]
            assert pids, f"there is no {case.target} at this point"
            running.strike(pids, case.signal)
            running.go()
            ended = running.ended()
            check_end(result, case, ended, unbroken)
            result.need(not (left := where.leftovers()), f"left: {'; '.join(left[:6])}")
            where.clear()
            if case.expected in (End.KILLED, End.FAILED, End.TERMINATED) or ended.code != 0:
                saved = newest(out)
                result.facts["resumed_from"] = saved
                check_resumed(result, lab, where, overrides, saved, out)
            check_outcome(result, case, out, unbroken)
            if result.problems:
                (lab.folder / f"{case.name}.txt").write_text(ended.text)
        finally:
            shutil.rmtree(out, ignore_errors=True)
    return result


def check_end(result: Result, case: Case, ended: Ended, unbroken: Baseline) -> None:
    """Exit code and report."""
    reported = ended.reported_s(WATCHED if case.expected is End.KILLED else TARGETS[case.target])
    result.facts |= {"exit": ended.code, "seconds": round(ended.seconds, 1), "lines": len(ended.after)}
    result.facts["reported_s"] = None if reported is None else round(reported, 1)
    result.need(ended.code == case.exit_code, f"exit {ended.code}, not {case.exit_code}: {_tail(ended)}")
    result.need(TRACEBACK not in ended.text, "a traceback on the console")
    if case.exit_code == 0:  # it also prints what every run prints
        more = len(ended.printed) - unbroken.lines
        result.need(more <= MAX_LINES, f"{more} lines more than a run that nothing breaks")
    else:
        result.need(len(ended.after) <= MAX_LINES, f"{len(ended.after)} lines after the crash")
    if case.expected is End.UNHARMED:
        return
    result.need(reported is not None, f"the report does not name the {case.target}: {_tail(ended)}")
    late = reported is not None and reported > REPORT_S
    result.need(not late, f"reported after {reported} s, more than {REPORT_S:g} s")


def check_resumed(result: Result, lab: Lab, where: Place, overrides: Sequence[str], saved: int, out: Path) -> None:
    """The same command again ends well, from the newest whole checkpoint."""
    kept = out / "run" / "checkpoints" / f"step-{saved:06d}" / "manifest.json"
    before = kept.stat().st_mtime_ns if saved else 0
    again = lab.start(where, overrides).ended()
    result.need(again.code == 0, f"started again it ended with {again.code}: {_tail(again)}")
    result.need(not saved or kept.stat().st_mtime_ns == before, f"step {saved} was trained again")
    result.need(not (left := where.leftovers()), f"left when started again: {'; '.join(left[:6])}")


def check_outcome(result: Result, case: Case, out: Path, unbroken: Baseline) -> None:
    """Every step once, and the end as it was to be."""
    if newest(out) != STEPS:
        result.need(False, f"the last checkpoint is of step {newest(out)}")
        return
    steps = Counter(row["step"] for row in metrics(out))
    result.need(steps == Counter(row["step"] for row in unbroken.rows), f"metrics hold the steps {sorted(steps)}")
    if case.setup == "vllm":  # does not repeat its samples on a CPU
        return
    equal = weights(out) == unbroken.weights and metrics(out) == unbroken.rows
    result.facts["bit_equal"] = equal
    if case.expected is End.COUNTED and not equal:
        result.need(lost(out) > 0, "the end differs, but no lost response was counted")
        for problem in uncounted(out):
            result.need(False, problem)
        return
    result.need(equal, f"the end is not bit-equal: {differing(metrics(out), unbroken.rows)}")


def lost(out: Path) -> float:
    """Responses and calls that were counted as lost."""
    names = ("reward/infrastructure_faults", "tools/unavailable")
    return float(sum(row.get(name, 0.0) for row in metrics(out) for name in names))


def uncounted(out: Path) -> list[str]:
    """Steps in which a response is neither scored as it deserves nor counted as a fault."""
    problems = []
    for row in metrics(out):
        shown = read_jsonl(out / "run" / "transcripts" / f"step-{row['step']:06d}.jsonl")
        faults = row.get("reward/infrastructure_faults", 0.0)
        if len(shown) + faults != PROMPTS * RESPONSES:
            problems.append(f"step {row['step']}: {len(shown)} responses and {faults:g} faults")
        wrong = [each for each in shown if abs(float(each["reward"]) - points(_response(each))) > 1e-9]
        if wrong:
            problems.append(f"step {row['step']}: {len(wrong)} rewards that are not those of their responses")
    return problems


def _response(row: Mapping[str, Any]) -> str:
    """What the reward reads: all messages up to the policy's last one."""
    messages = list(row["responses"])
    while messages[-1]["role"] != "assistant":
        messages.pop()
    return "\n".join(message["content"] for message in messages)


def differing(rows: Sequence[Mapping[str, Any]], wanted: Sequence[Mapping[str, Any]]) -> str:
    """The first metrics that differ."""
    for one, two in zip(rows, wanted, strict=False):
        names = [name for name in {*one, *two} if one.get(name) != two.get(name)]
        if names:
            return f"step {two['step']}: {', '.join(sorted(names)[:4])}"
    return "weights alone" if len(rows) == len(wanted) else f"{len(rows)} rows"


def _tail(ended: Ended) -> str:
    return " | ".join(line for _, line in (ended.after or ended.lines)[-4:])[-400:]
