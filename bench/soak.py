"""Long runs with killed processes: does any resource grow, is a step lost or trained twice?

    python bench/soak.py grow [--steps 1000] [--kill scorer,sandbox,..] [--engine hf] [--seconds 10] [key=value ...]
    python bench/soak.py break [--steps 200] [--every 20] [--engine hf] [key=value ...]

grow: short steps with a tool call per episode, while processes of the selected kinds (default: all) are killed at
random (seeded): scorers, sandbox workers and engines, which the run itself restarts, and one of two environment
servers, which serve every other task and which this script restarts, as a service manager would. There is at least one
step between two engine kills.
Memory, descriptors, threads and sockets of controller and rank, temporary files (without logs: Ray keeps five per
process that it has started) and the step time, as the median of 20 steps, are sampled at every step; by linear
regression none may grow by more than 5 % from step 100 to the last. A resource sampled at fewer than four fifths of
these steps is not judged, and counts as a failure.

break: the controller is killed with SIGKILL every --every steps and the same command is restarted until all steps are
done. Every step must be in the metrics once, equal to an uninterrupted run, with bit-equal weights.

A table goes to standard error and JSON to standard output. The exit code is 1 if a bound is violated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from common import ROOT, console, machine, versions
from rich.table import Table

from tests.chaos.outcome import metrics, weights
from tests.chaos.parts import AlwaysCalls, LookEnv
from tests.chaos.processes import sandboxes, scorers
from tests.support.service import free_port, wait_for
from toolrl.envs.openenv.remote import RemoteFactory
from verl.tracking.jsonl import read_jsonl

WARM_UP = 100  # steps until every code path has run once
MAX_GROWTH = 0.05
MIN_SAMPLED = 0.8  # share of the steps after the warm-up; fewer samples count as a failure
_OF_EACH = ("memory, MiB", "descriptors", "threads", "sockets")
SAMPLED = ("temporary files", *(f"{who} {what}" for who in ("controller", "rank") for what in _OF_EACH))
STEP_TIME = "step, s"
STEPS_OF_TIME = 20  # a step that replaces a process takes ten times as long, and such steps are drawn at random
KINDS = ("scorer", "sandbox", "engine", "env")
_SERVERS = "SOAK_SERVERS"  # environment variable with the URLs of the environment servers
_POLL_S = 0.05
_END_S = 60.0  # for the processes of a killed run to exit
_OVERRIDES = (
    "recipe=mini_grpo",
    "reward.name=tests.chaos.parts:reward",  # has no gold response, which this format would read as a call
    "data.train_batch_size=2",
    "data.val_files=[]",
    "data.user_code=true",  # rows name the environment of this file
    "data.max_prompt_length=512",
    "data.max_response_length=64",
    "actor.ppo_mini_batch_size=2",
    "rollout.n=2",
    "env.name=tool",
    "env.tools=[python]",
    "env.max_tool_calls=1",
    "env.max_turn_tokens=16",
    "sandbox.num_workers=1",
    "reward.max_fault_share=0.9",  # one of four responses is already 0.25
    "trainer.test_freq=0",
    "trainer.val_before_train=false",
    "trainer.keep_best=0",
    "trainer.device=cpu",
    "trainer.experiment_name=run",
)


class EveryTextCalls(AlwaysCalls):
    """Parses any text as a tool call, for a model too small to write one."""

    call_s = 0.0


class Echo(LookEnv):
    """The environment on the servers."""

    call_s = 0.0


class Served(RemoteFactory):
    """Echo on the environment servers."""

    def __init__(self) -> None:
        super().__init__(os.environ[_SERVERS].split())


class Servers:
    """Two environment servers, restarted after an exit."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = [free_port() for _ in range(2)]
        self.processes = [self._start(port) for port in self._ports]

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self._ports]

    def wait(self) -> None:
        """Wait until both answer."""
        for process, url in zip(self.processes, self.urls, strict=True):
            wait_for(f"{url}/health", process)

    def restart(self) -> None:
        """Restart those that have exited."""
        pairs = zip(self.processes, self._ports, strict=True)
        self.processes = [process if process.poll() is None else self._start(port) for process, port in pairs]

    def close(self) -> None:
        for process in self.processes:
            end(process)

    def _start(self, port: int) -> psutil.Popen:
        argv = [sys.executable, "-m", "toolrl.envs.openenv.server", "--env", f"{Path(__file__).resolve()}:Echo"]
        with (self._folder / "servers.txt").open("ab") as output:
            return psutil.Popen([*argv, "--port", str(port)], env=_variables(), stdout=output, stderr=output, cwd=ROOT)


def _variables() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "bench")]), "OMP_NUM_THREADS": "1"}


@dataclass
class Soaked:
    """(step, value) samples of every resource, and counts of killed processes."""

    last: int = 0  # the last step
    figures: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    killed: Counter[str] = field(default_factory=Counter)

    def add(self, step: int, found: Mapping[str, float]) -> None:
        self.last = max(self.last, step)
        for name, value in found.items():
            self.figures.setdefault(name, []).append((step, value))

    def growth(self, name: str, of: float | None = None) -> float | None:
        """Relative growth of the regression line from the end of the warm-up to the last step.

        of: share of the steps, the last ones, in place of those after the warm-up
        None if it is not finite, or with samples at fewer than MIN_SAMPLED of these steps.
        """
        warm = min(WARM_UP, self.last // 3) if of is None else round(self.last * (1 - of))
        pairs = [(step, value) for step, value in self.figures.get(name, ()) if step > warm]
        if len(pairs) < max(2, MIN_SAMPLED * (self.last - warm)):
            return None
        line = statistics.linear_regression(*zip(*pairs, strict=True))
        first, last = (line.slope * step + line.intercept for step in (warm + 1, self.last))
        if not (math.isfinite(first) and math.isfinite(last)):
            return None
        return (last - first) / first if first > 0 else float(last > first)


def command(folder: Path, steps: int, engine: str, more: Sequence[str], served: bool = False) -> list[str]:
    """The run's command; writes its data into the folder. served: every other task goes to the servers."""
    data = folder / "questions.jsonl"
    written = [
        {
            "data_source": "soak",
            "prompt": [{"role": "user", "content": f"What is {one} + {two}?"}],
            "reward_model": {"style": "rule", "ground_truth": str(one + two)},
            **({"env": f"{Path(__file__).resolve()}:Served"} if served and (one + two) % 2 else {}),
        }
        for one in range(20)
        for two in range(20)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in written))
    argv = [
        *_OVERRIDES,
        f"data.train_files=[{data}]",
        f"env.tool_call_format={Path(__file__).resolve()}:EveryTextCalls",
        f"rollout.name={engine}",
    ]
    argv += [f"trainer.total_training_steps={steps}", f"trainer.default_local_dir={folder}", *more]
    return [sys.executable, "-m", "verl.trainer.main_ppo", *argv]


@contextmanager
def started(argv: Sequence[str], folder: Path, servers: Sequence[str] = ()) -> Iterator[psutil.Popen]:
    """The run, with its own TMPDIR; killed after the block with all descendants. servers: their URLs."""
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    variables = _variables() | {"TMPDIR": str(temporary), "RAY_TMPDIR": str(temporary), _SERVERS: " ".join(servers)}
    with (folder / "output.txt").open("ab") as output:
        process = psutil.Popen(argv, env=variables, stdout=output, stderr=output, stdin=subprocess.DEVNULL, cwd=ROOT)
    try:
        yield process
    finally:
        end(process)


def end(process: psutil.Popen) -> None:
    """Kill it with its descendants, and wait for them."""
    below = process.children(recursive=True) if process.is_running() else []
    with suppress(psutil.NoSuchProcess):
        process.kill()
    process.wait()
    _, left = psutil.wait_procs(below, _END_S)
    for each in left:
        with suppress(psutil.NoSuchProcess):
            each.kill()


def rows(folder: Path) -> list[dict[str, Any]]:
    """The metrics rows of steps; empty while a row is being written."""
    with suppress(OSError, ValueError):
        return [row for row in read_jsonl(folder / "run" / "metrics.jsonl") if "time/step_s" in row]
    return []


def command_of(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def victims(controller: psutil.Process, kind: str) -> list[int]:
    """The pids of the living processes of a kind."""
    if kind == "engine":
        engines = workers(controller)[1:]
        return [each.pid for engine in engines for each in (engine, *engine.children(recursive=True))]
    return scorers(controller.pid) if kind == "scorer" else sandboxes(controller.pid)


def workers(controller: psutil.Process) -> list[psutil.Process]:
    """The rank, which starts first and is never replaced, then the engine, which may be."""
    below = controller.children(recursive=True)
    return sorted((each for each in below if "ray::_Worker" in command_of(each)), key=psutil.Process.create_time)


def measured(controller: psutil.Process, temporary: Path) -> dict[str, float]:
    """Samples of controller and rank; killed kinds are excluded, since a fresh process is smaller.

    Unavailable samples are skipped, and counted as missing in the end.
    """
    found = {
        "temporary files": float(sum(len(files) for place, _, files in os.walk(temporary) if "/logs" not in place))
    }
    with suppress(psutil.Error):
        for name, process in (("controller", controller), *(("rank", each) for each in workers(controller)[:1])):
            found[f"{name} memory, MiB"] = process.memory_full_info().uss / 2**20
            found[f"{name} descriptors"] = float(process.num_fds())
            found[f"{name} threads"] = float(process.num_threads())
            found[f"{name} sockets"] = float(len(process.net_connections("all")))
    return found


def grow(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    draw, soaked, served = random.Random(options.seed), Soaked(), "env" in options.kill
    engine_lost_at = 0  # step of the last kill; a run aborts at the fourth loss without a step in between
    argv = command(folder, options.steps, options.engine, ["trainer.save_freq=0", *options.overrides], served)
    with ExitStack() as stack:
        servers = Servers(folder) if served else None
        if servers is not None:
            stack.callback(servers.close)
            servers.wait()
        controller = stack.enter_context(started(argv, folder, servers.urls if servers else ()))
        due, written, size = float("inf"), folder / "run" / "metrics.jsonl", 0
        while controller.poll() is None:
            time.sleep(_POLL_S)
            done = []
            if written.exists() and written.stat().st_size != size:
                size, done = written.stat().st_size, rows(folder)
            if done and done[-1]["step"] > soaked.last:
                soaked.add(done[-1]["step"], measured(controller, folder / "tmp"))
                due = min(due, time.monotonic() + options.seconds)
            if servers is not None:
                servers.restart()
            kinds = [kind for kind in options.kill if kind != "engine" or soaked.last > engine_lost_at]
            if kinds and time.monotonic() > due:
                kind = draw.choice(kinds)
                with suppress(psutil.Error):  # it has exited meanwhile
                    own = [each.pid for each in servers.processes] if servers and kind == "env" else None
                    if found := own or victims(controller, kind):
                        psutil.Process(draw.choice(found)).kill()
                        soaked.killed[kind] += 1
                        engine_lost_at = soaked.last if kind == "engine" else engine_lost_at
                due = time.monotonic() + draw.uniform(0.5, 1.5) * options.seconds
        code = controller.returncode
    return grown(folder, soaked, options.steps, code)


def _medians(values: Sequence[float]) -> list[float]:
    """Of each value and those before it, STEPS_OF_TIME in all."""
    return [statistics.median(values[max(0, end - STEPS_OF_TIME) : end]) for end in range(1, len(values) + 1)]


def grown(folder: Path, soaked: Soaked, steps: int, code: int) -> dict[str, Any]:
    """Print the table; returns it as JSON. `met`: all resources were sampled and none has grown."""
    done = rows(folder)
    for row, seconds in zip(done, _medians([row["time/step_s"] for row in done]), strict=True):
        soaked.add(row["step"], {STEP_TIME: seconds})
    finished = code == 0 and [row["step"] for row in done] == list(range(1, steps + 1))
    figures = {name: _summary(soaked, name) for name in (*SAMPLED, STEP_TIME)}
    table = Table("", "samples", "first", "median", "last", "growth")
    for name, each in figures.items():
        shown = ("" if each[column] is None else f"{each[column]:.4g}" for column in ("first", "median", "last"))
        growth = "not judged" if each["growth"] is None else f"{each['growth']:+.2%}"
        table.add_row(name, str(each["samples"]), *shown, growth)
    console.print(table)
    lost = sum(row["reward/infrastructure_faults"] for row in done)
    console.print(f"{len(done)} steps, exit code {code}, killed {dict(soaked.killed)}, responses lost {lost:g}")
    flat = all(each["growth"] is not None and each["growth"] <= MAX_GROWTH for each in figures.values())
    return {
        "figures": figures,
        "killed": soaked.killed,
        "lost": lost,
        "steps": len(done),
        "exit_code": code,
        "met": finished and flat,
    }


def _summary(soaked: Soaked, name: str) -> dict[str, Any]:
    values = [value for _, value in soaked.figures.get(name, ()) if math.isfinite(value)]
    first, last, median = (values[0], values[-1], statistics.median(values)) if values else (None, None, None)
    return {"samples": len(values), "first": first, "last": last, "median": median, "growth": soaked.growth(name)}


def broken(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    more = [f"trainer.save_freq={options.save_freq}", "trainer.keep_last=2", *options.overrides]
    whole, cut, kills = folder / "whole", folder / "cut", 0
    for each in (whole, cut):
        each.mkdir()
    with started(command(whole, options.steps, options.engine, more), whole) as run:
        run.wait()
    ended = False
    while not ended:
        with started(command(cut, options.steps, options.engine, more), cut) as run:
            while run.poll() is None and len(rows(cut)) < (kills + 1) * options.every:
                time.sleep(_POLL_S)
            ended = run.poll() is not None
            if not ended:
                run.send_signal(signal.SIGKILL)
                kills += 1
        console.print(f"{len(rows(cut))} steps, {kills} kills")
    one, two = metrics(whole), metrics(cut)
    same = {
        "every step once": [row["step"] for row in two] == list(range(1, options.steps + 1)),
        "figures bit-equal": one == two,
        "weights bit-equal": weights(whole) == weights(cut),
    }
    for name, holds in same.items():
        console.print(f"{name}: {holds}")
    return {"kills": kills, "steps": len(two), **same, "met": all(same.values())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("grow", "break"))
    parser.add_argument("overrides", nargs="*", help="key=value overrides of the run's configuration")
    parser.add_argument("--steps", type=int, help="default: 1000 for grow, 200 for break")
    parser.add_argument(
        "--kill",
        type=lambda text: [each for each in text.split(",") if each],
        default=list(KINDS),
        help=f"kinds of processes; default: all, {','.join(KINDS)}; '' for none",
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="mean time between kills")
    parser.add_argument("--every", type=int, default=20, help="steps between kills of the controller")
    parser.add_argument("--save-freq", type=int, default=5)
    parser.add_argument("--engine", choices=("hf", "vllm"), default="hf")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if unknown := set(options.kill) - set(KINDS):
        parser.error(f"--kill {', '.join(sorted(unknown))}: choose from {', '.join(KINDS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run is killed, too
    options.steps = options.steps or (1000 if options.mode == "grow" else 200)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    console.print(f"in {folder}")
    result = (grow if options.mode == "grow" else broken)(folder, options)
    facts = {"mode": options.mode, "engine": options.engine, "machine": machine(), "versions": versions()}
    print(json.dumps({**result, **facts}), flush=True)
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
