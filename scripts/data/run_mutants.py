"""Runs the tests of a repository many times, with and without mutations, each run in a fork of this process.

    python -I run_mutants.py REQUEST.json

This process imports pytest and never the repository's code. One traced run notes which functions each test calls, and
keeps what it compiled, checked by content; after that a mutation is run with the tests that call its function, and
nothing but the mutation is compiled. Prints a JSON list with an item for each run. Outcomes are not protected from the
code under test: verdicts come from run_tests.py.
Standard library only, for any Python from 3.7 on.
"""

from __future__ import annotations

import compileall
import gc
import json
import os
import py_compile
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

POLL_S = 0.01
MAX_ERROR_CHARS = 300


def main() -> None:
    given = Path(sys.argv[1])
    request = json.loads(given.read_text())
    given.unlink()
    sys.dont_write_bytecode = True
    import pytest

    compiled = Path(request["compiled"])
    sys.pycache_prefix = str(compiled)
    if not compiled.is_dir():
        compiled.mkdir()
        checked = py_compile.PycInvalidationMode.CHECKED_HASH  # mutations of one second have equal times
        compileall.compile_dir(request["root"], quiet=2, invalidation_mode=checked)
    gc.freeze()
    sys.stdout.write(json.dumps([_with_mutation(request["root"], run, pytest) for run in request["runs"]]))


def _with_mutation(root: str, run: dict[str, Any], pytest: Any) -> dict[str, Any]:
    if not run["path"]:
        return _run(root, run, pytest)
    file = Path(root, run["path"])
    before = file.read_bytes()
    file.write_text(run["source"], encoding="utf-8", newline="")
    try:
        return _run(root, run, pytest)
    finally:
        file.write_bytes(before)


def _run(root: str, run: dict[str, Any], pytest: Any) -> dict[str, Any]:
    """One run in a fork, which is killed with its process group after its time."""
    report = tempfile.TemporaryFile("w+")  # noqa: SIM115  also of the fork
    pid = os.fork()
    if pid == 0:
        try:
            _in_fork(root, run, pytest, report)
        finally:
            os._exit(0)
    deadline = time.monotonic() + run["timeout_s"]
    ended = 0
    while not ended and time.monotonic() < deadline:
        time.sleep(POLL_S)
        ended = os.waitpid(pid, os.WNOHANG)[0]
    with suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    if not ended:
        os.waitpid(pid, 0)
    report.seek(0)
    lines = report.read().splitlines()
    result: dict[str, Any] = json.loads(lines[-1]) if lines and ended else {"ended": False}
    return result


def _in_fork(root: str, run: dict[str, Any], pytest: Any, report: Any) -> None:
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.chdir(root)
    sys.path.insert(0, root)
    sys.argv = ["pytest"]
    sys.dont_write_bytecode = not run["trace"]
    plugin = _Recorder(root, run["tests"], run["trace"])
    options = ["-p", "no:cacheprovider", "--rootdir", root, "--continue-on-collection-errors", "--tb=short"]
    code = int(pytest.main([*options, "--maxfail", str(run["maxfail"]), *run["files"]], plugins=[plugin]))
    sys.setprofile(None)
    threading.setprofile(None)
    found = {"ended": code in (0, 1, 2), "outcomes": plugin.outcomes, "errors": plugin.errors}
    report.write(json.dumps({**found, "seconds": plugin.seconds, "called": plugin.called}))
    report.flush()


class _Recorder:
    """A plugin that selects tests and notes what each does.

    called: test -> [file, line] of the functions that it calls; "": those called while tests are collected
    """

    def __init__(self, root: str, tests: list[str] | None, trace: bool) -> None:
        self._root, self._tests = root + os.sep, None if tests is None else frozenset(tests)
        self._codes: set[Any] = set()
        self.outcomes: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self.called: dict[str, list[Any]] = {}
        if trace:
            sys.setprofile(self._note)
            threading.setprofile(self._note)

    def _note(self, frame: Any, event: str, _: Any) -> None:
        if event == "call":
            self._codes.add(frame.f_code)

    def _called(self, name: str) -> None:
        codes, self._codes = self._codes, set()
        places = {(code.co_filename, code.co_firstlineno) for code in codes}
        self.called[name] = [[file[len(self._root) :], line] for file, line in places if file.startswith(self._root)]

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self._tests is not None:
            items[:] = [item for item in items if item.nodeid in self._tests]

    def pytest_collection_finish(self) -> None:
        self._called("")

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            lines = [line for line in str(report.longrepr).splitlines() if line.startswith("E ")]
            self.errors[report.nodeid] = (lines or [""])[-1][1:].strip()[:MAX_ERROR_CHARS]

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid
        self.seconds[name] = self.seconds.get(name, 0.0) + report.duration
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.errors.setdefault(name, (crash.message if crash else "").partition("\n")[0][:MAX_ERROR_CHARS])
        if self.outcomes.get(name, "passed") == "passed":
            self.outcomes[name] = report.outcome

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._called(nodeid)


if __name__ == "__main__":
    main()
