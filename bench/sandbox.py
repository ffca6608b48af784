"""Row 12: executions/s of the local sandbox, with the latency of a trivial execution.

    python bench/sandbox.py [--workers 2] [--executions 400] [--rounds 3]

Ours: `print(1)` in LocalSandbox with numpy and sympy preloaded, one concurrent execution per worker, wall time.
Theirs: a fresh `bwrap --unshare-all python -I -c 'print(1)'` each, same concurrency; weaker confinement and nothing
preloaded. The sides alternate; results are medians over rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from common import Result, alternate, medians, report, skip_without

from toolrl.sandbox.local import LocalSandbox
from verl.envs.sandbox import Status

TARGET = 150.0  # executions/s
SLOWEST_MS = 15.0  # median latency


async def trivial(sandbox: LocalSandbox) -> None:
    """One execution in our sandbox."""
    done = await sandbox.run("print(1)")
    assert (done.status, done.stdout) == (Status.FINISHED, "1\n"), done


async def fresh() -> None:
    """One execution in a fresh bubblewrap and interpreter, with the whole host read-only."""
    process = await asyncio.create_subprocess_exec(
        *("bwrap", "--unshare-all", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"),
        *("--ro-bind", sys.prefix, sys.prefix, sys.executable, "-I", "-c", "print(1)"),
        stdout=subprocess.PIPE,
    )
    printed, _ = await process.communicate()
    assert printed == b"1\n", printed


def measure(runner: asyncio.Runner, workers: int, executions: int, execute: Callable[[], Any]) -> dict[str, float]:
    """Rate and latencies of `executions`, `workers` concurrently."""
    latencies: list[float] = []

    async def chain() -> None:
        for _ in range(executions // workers):
            started = time.perf_counter()
            await execute()
            latencies.append(1000 * (time.perf_counter() - started))

    async def chains() -> None:
        await asyncio.gather(*[chain() for _ in range(workers)])

    started = time.perf_counter()
    runner.run(chains())
    seconds = time.perf_counter() - started
    percentiles = statistics.quantiles(latencies, n=100)
    return {"executions/s": len(latencies) / seconds, "p50 ms": percentiles[49], "p99 ms": percentiles[98]}


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--executions", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    skip_without(Path(shutil.which("bwrap") or "bwrap"), "apt-get install bubblewrap")
    with asyncio.Runner() as runner:
        sandbox = LocalSandbox(arguments.workers)
        figures = alternate(
            {"ours": partial(trivial, sandbox), "theirs": fresh},
            arguments.rounds,
            partial(measure, runner, arguments.workers, arguments.executions),
        )
        runner.run(sandbox.close())
    of_ours = medians(figures["ours"])
    report(
        Result(
            row=12,
            name=f"sandbox, trivial executions/s, {arguments.workers} at a time",
            ratio=of_ours["executions/s"],
            target=TARGET,
            ours=of_ours,
            theirs=medians(figures["theirs"]),
            limits={"median latency in ms": (of_ours["p50 ms"], SLOWEST_MS)},
        )
    )


if __name__ == "__main__":
    main()
