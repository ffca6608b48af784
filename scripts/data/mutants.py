"""The tests of a repository with and without mutations: all, traced, then those that call the mutated function."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.data.mutations import InjectedBug
from toolrl.swe.runtime import TESTBED, CommandFailedError, Runtime, checked
from verl.errors import ConfigError

COMPILED = "/tmp/compiled"  # in every runtime
START_S = 3.0  # of pytest, beyond the tests
BASELINE_S = 600.0
SLOWER = 5.0  # how many times longer the tests may take with a bug
DOES_NOT_END, UNNOTICED = "does not end", "no test notices"
NO_ERROR = "the test does not pass"


@dataclass(frozen=True)
class Baseline:
    """A repository without a bug.

    passing: tests that pass twice
    flaky:   tests that pass once
    seconds: of each test
    called:  functions that each test calls, by file and first line; "": those called while tests are collected
    compiled: a folder with what the interpreter and pytest compiled
    """

    folder: Path
    passing: tuple[str, ...]
    flaky: tuple[str, ...]
    seconds: Mapping[str, float]
    called: Mapping[str, frozenset[tuple[str, int]]]
    compiled: Path

    def covering(self, path: str, lines: tuple[int, int]) -> tuple[str, ...]:
        """The tests that call a function, or one defined in it."""

        def within(test: str) -> bool:
            return any(file == path and lines[0] <= line <= lines[1] for file, line in self.called.get(test, ()))

        return self.passing if within("") else tuple(filter(within, self.passing))

    def of_file(self, path: str) -> tuple[str, ...]:
        """The tests that call a function of a file."""
        return tuple(test for test in self.passing if any(file == path for file, _ in self.called.get(test, ())))


@dataclass(frozen=True)
class Trial:
    """What a mutation does. reason: why it is no task, or "". error: of the first failing test"""

    reason: str
    failing: tuple[str, ...] = ()
    error: str = ""


async def measure_baseline(runtime: Runtime, folder: Path, compiled: Path) -> Baseline:
    """Two runs of all tests. compiled: a folder to make. Raises ConfigError if no test passes twice."""
    everything = {"path": "", "source": "", "tests": None, "files": [], "maxfail": 0, "timeout_s": BASELINE_S}
    runs = [{**everything, "trace": True}, {**everything, "trace": False}]
    try:
        traced, plain = await _run(runtime, runs)
        await runtime.download(COMPILED, compiled)
    except CommandFailedError as error:
        raise ConfigError(f"{folder}: its tests cannot be run; has --environment pytest? {error}") from error
    if not (traced["ended"] and plain["ended"]):
        raise ConfigError(f"{folder}: its tests do not end regularly within {BASELINE_S:g} s")
    passed = [{test for test, outcome in run["outcomes"].items() if outcome == "passed"} for run in (traced, plain)]
    if not passed[0] & passed[1]:
        error = next(iter(traced["errors"].values()), "it has none")
        raise ConfigError(f"{folder}: no test passes; has --environment what they need? {error}")
    return Baseline(
        folder,
        tuple(sorted(passed[0] & passed[1])),
        tuple(sorted(passed[0] ^ passed[1])),
        plain["seconds"],
        {test: frozenset((file, line) for file, line in places) for test, places in traced["called"].items()},
        compiled,
    )


async def try_mutations(
    runtime: Runtime, base: Baseline, tried: Sequence[tuple[str, InjectedBug]], max_failing: int
) -> list[Trial]:
    """One after the other, in one interpreter. tried: file and mutation"""
    covering = [base.covering(path, mutation.lines) for path, mutation in tried]
    requests = [
        {
            "path": path,
            "source": mutation.source,
            "tests": tests,
            "files": list(dict.fromkeys(test.partition("::")[0] for test in tests)),
            "maxfail": max_failing + 1,
            "timeout_s": START_S + SLOWER * sum(base.seconds[test] for test in tests),
            "trace": False,
        }
        for (path, mutation), tests in zip(tried, covering, strict=True)
        if tests
    ]
    found = iter(await _run_apart(runtime, requests))
    return [_trial(next(found), tests, base, max_failing) if tests else Trial(UNNOTICED) for tests in covering]


def _trial(run: Mapping[str, Any], tests: Sequence[str], base: Baseline, max_failing: int) -> Trial:
    if not run["ended"]:
        return Trial(DOES_NOT_END)
    failing = tuple(test for test in tests if run["outcomes"].get(test) != "passed")
    if not failing:
        return Trial(UNNOTICED)
    if len(failing) == len(base.passing):
        return Trial("no test passes")
    if len(failing) > max_failing:
        return Trial("too many tests fail")
    return Trial("", failing, run["errors"].get(failing[0]) or NO_ERROR)


async def _run_apart(runtime: Runtime, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Together if that works; a mutation that ends all processes of the runtime, by their memory, is found alone."""
    try:
        return await _run(runtime, requests) if requests else []
    except CommandFailedError:
        if len(requests) == 1:
            return [{"ended": False}]
        return [each for request in requests for each in await _run_apart(runtime, [request])]


async def _run(runtime: Runtime, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    folder = f"/tmp/{secrets.token_hex(8)}"
    script = Path(__file__).with_name("run_mutants.py").read_bytes()
    request = {"root": TESTBED, "compiled": COMPILED, "runs": requests}
    await runtime.write(f"{folder}/run_mutants.py", script)
    await runtime.write(f"{folder}/request.json", json.dumps(request).encode())
    command = ["python", "-I", f"{folder}/run_mutants.py", f"{folder}/request.json"]
    timeout_s = START_S + sum(request["timeout_s"] for request in requests)
    done = await runtime.execute(command, timeout_s=timeout_s)
    await checked(runtime, ["/bin/rm", "-rf", folder])
    try:
        found: list[dict[str, Any]] = json.loads(done.stdout)
    except ValueError as error:
        raise CommandFailedError(done.stderr.decode(errors="replace").strip()[-500:]) from error
    return found
