"""Runs tests in a runtime, each run in a fork of this process, and prints what each test did.

    python -I run_tests.py REQUEST.json

This process imports pytest and never the repository's code. It hides itself from its forks, and prints only what a fork
reported with its token before its regular end. Each run has a sentinel file of its own. The runs after
the first need all of its tests to pass. The code under test shares a process with pytest, so a fork also reports
whether functions of pytest, unittest or the interpreter were replaced, plugins were added or test files changed.
Standard library only, for any Python from 3.7 on.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import importlib
import json
import os
import pkgutil
import select
import signal
import sys
import tempfile
import time
import types
from contextlib import suppress
from pathlib import Path
from typing import Any, Dict, Sequence, Tuple  # noqa: UP035  for Python 3.7

GUARDED = ("_pytest", "pytest", "pluggy", "unittest", "builtins", "sys", "os", "posix", "posixpath", "time", "atexit",
           "signal", "json", "hashlib", "importlib")  # fmt: skip
# Set by pytest itself while it runs, or by harmless code.
VARIABLE = ("excepthook", "unraisablehook", "displayhook", "breakpointhook", "__interactivehook__",
            "_reprcompare", "_assertion_pass", "_")  # fmt: skip
Fingerprint = Dict[Tuple[str, ...], Tuple[int, ...]]  # noqa: UP006
KINDS = (types.FunctionType, types.BuiltinFunctionType, classmethod, staticmethod, property, type)
PR_SET_DUMPABLE = 4
CHUNK = 1 << 16
MOST_IDLE = 10  # between checks after tests, in multiples of the time of one
LOG_BYTES = 4000  # of the end of the output


def main() -> None:
    given = Path(sys.argv[1])
    request = json.loads(given.read_text())
    given.unlink()
    sys.dont_write_bytecode = True
    try:
        import pytest

        _preload("_pytest")
    except ImportError as error:
        sys.stdout.write(json.dumps({"problem": f"pytest cannot be imported: {error}"}))
        return
    # Compiled files in the repository are ignored, and those that a run leaves.
    sys.pycache_prefix = request["compiled"] or os.devnull
    gc.freeze()  # forks neither traverse nor copy what is loaded
    _set_dumpable(0)
    first, *rest = request["runs"]
    runs = [_run(request, first, pytest)]
    if all(runs[0]["outcomes"].get(name) == "passed" for name in first["tests"]):
        runs += [_run(request, run, pytest) for run in rest]
    sys.stdout.write(json.dumps({"runs": runs}))


def _preload(package: str) -> None:
    """Modules that pytest would import later, when the repository could shadow or replace them."""
    for name in ("difflib", "pprint", "unittest.case", "unittest.mock", "doctest", "pdb", "logging", "traceback"):
        importlib.import_module(name)
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        try:
            importlib.import_module(module.name)
        except Exception:  # noqa: BLE001  an optional part
            continue


def _set_dumpable(value: int) -> None:
    """0: other processes of this user can neither trace this one nor open its files."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, value, 0, 0, 0)


def _run(request: dict[str, Any], run: dict[str, Any], pytest: Any) -> dict[str, Any]:
    """One run in a fork; its outcomes count only if it ended regularly in time."""
    reads, writes = os.pipe()
    token = os.urandom(16).hex()
    log = tempfile.TemporaryFile()  # noqa: SIM115  also of the fork
    sentinel, files = Path(run["sentinel"]), [*request["files"], run["sentinel"]]
    sentinel.parent.mkdir(parents=True, exist_ok=True)
    sentinel.write_text(run["text"])
    before = _hashes(files)
    pid = os.fork()
    if pid == 0:
        os.close(reads)
        _run_pytest(request["root"], files, run, pytest, writes, token, log.fileno())
    os.close(writes)
    data, code = _wait(pid, reads, run["timeout_s"])
    messages = []
    outcomes: dict[str, str] = {}
    for line in data.decode(errors="replace").splitlines():
        start, _, rest = line.partition(" ")
        if start == token:
            messages.append(json.loads(rest))
    for each in messages:
        if "test" in each and outcomes.get(each["test"], "passed") == "passed":  # one name may stand for several tests
            outcomes[each["test"]] = each["outcome"]
    log.seek(max(0, log.seek(0, 2) - LOG_BYTES))
    tampered = [each["tampered"] for each in messages if "tampered" in each]
    if _hashes(files) != before:
        tampered.append("test files were changed")
    with suppress(OSError):
        sentinel.unlink()
    return {
        "outcomes": outcomes,
        "ended": any("end" in each for each in messages),
        "timeout": code is None,
        "tampered": tampered,
        "log": log.read().decode(errors="replace"),
    }


def _wait(pid: int, reads: int, timeout_s: float) -> tuple[bytes, int | None]:
    """What the fork wrote, and its exit code; None after the time-out. Its process group is killed."""
    data = b""
    code: int | None = None
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        data += _available(reads, 0.02)
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = status
            break
    with suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    if code is None:
        os.waitpid(pid, 0)
    while True:
        more = _available(reads, 0)
        if not more:
            break
        data += more
    os.close(reads)
    return data, code


def _available(descriptor: int, timeout_s: float) -> bytes:
    ready = select.select([descriptor], [], [], timeout_s)[0]
    data = os.read(descriptor, CHUNK) if ready else b""
    if ready and not data:
        time.sleep(timeout_s)  # end of file: wait for the exit without spinning
    return data


def _hashes(files: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in files:
        try:
            found[name] = hashlib.sha256(Path(name).read_bytes()).hexdigest()
        except OSError:
            found[name] = ""
    return found


def _run_pytest(
    root: str, files: list[str], run: dict[str, Any], pytest: Any, writes: int, token: str, log: int
) -> None:
    """Run pytest in this fork, with hooks that report. Never returns.

    The code under test shares the process. So what reports is in closures that the garbage collector does not list.
    """
    os.setsid()
    _set_dumpable(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((nothing, log, log)):
        os.dup2(descriptor, number)
    wanted = frozenset(run["wanted"])
    phases: dict[str, dict[str, str]] = {}
    known: set[int] = set()  # plugins
    write, dumps, clock = os.write, json.dumps, time.monotonic
    fingerprint, difference, hashes = _fingerprint, _difference, _hashes
    contents, states = hashes(files), [fingerprint()]
    idle_until = 0.0

    def send(message: dict[str, Any]) -> None:
        write(writes, f"{token} {dumps(message)}\n".encode())

    def check(always: bool = True) -> None:
        nonlocal idle_until
        began = clock()
        if not always and began < idle_until:
            return
        changed = difference(states, fingerprint())
        if changed:
            send({"tampered": changed})
        if hashes(files) != contents:
            send({"tampered": "test files were changed"})
        idle_until = clock() + MOST_IDLE * (clock() - began)

    def name_of(nodeid: str) -> str:
        """Its node id, or a name of published rows: without the file (R2E-Gym), or cut at a space (SWE-bench)."""
        names = [".".join(nodeid.split("::")[1:]), nodeid.split(" ")[0]]
        return next((name for name in names if name in wanted), nodeid)

    def pytest_load_initial_conftests(early_config: Any) -> None:
        """The environment's plugins are loaded, and patched pytest if they do. The repository becomes importable only
        now: no file of it is a plugin by its metadata."""
        states.append(fingerprint())
        sys.path.insert(0, root)
        known.update(map(id, early_config.pluginmanager.get_plugins()))

    def pytest_collectstart(collector: Any) -> None:
        check(isinstance(collector, pytest.Module))

    def pytest_collection_modifyitems(items: list[Any]) -> None:
        items[:] = [item for item in items if name_of(item.nodeid) in wanted]

    def pytest_collection_finish(session: Any) -> None:
        check()
        for plugin in session.config.pluginmanager.get_plugins():
            name = getattr(plugin, "__file__", None) or type(plugin).__module__
            expected = id(plugin) in known or name.endswith("conftest.py") or name.startswith("_pytest.")
            if not expected and plugin is not session:
                send({"tampered": f"a plugin was added: {name}"})

    def pytest_runtest_logreport(report: Any) -> None:
        if report.outcome == "skipped" and hasattr(report, "wasxfail"):
            outcome = "passed"
        elif report.outcome == "failed" and report.when != "call":
            outcome = "error"
        else:
            outcome = report.outcome
        phases.setdefault(report.nodeid, {})[report.when] = outcome

    def pytest_runtest_logfinish(nodeid: str) -> None:
        check(False)
        ended = phases.pop(nodeid, {})
        bad = [each for each in ended.values() if each != "passed"]
        complete = "call" in ended or bad
        send({"test": name_of(nodeid), "outcome": bad[0] if bad else "passed" if complete else "missing"})

    hooks = types.ModuleType("hooks")
    vars(hooks).update(
        pytest_load_initial_conftests=pytest_load_initial_conftests,
        pytest_collectstart=pytest_collectstart,
        pytest_collection_modifyitems=pytest_collection_modifyitems,
        pytest_collection_finish=pytest_collection_finish,
        pytest_runtest_logreport=pytest_runtest_logreport,
        pytest_runtest_logfinish=pytest_runtest_logfinish,
    )
    gc.freeze()  # gc.get_objects lists none of them
    try:
        os.chdir(root)
        sys.argv = ["pytest"]
        options = ["-p", "no:cacheprovider", "--continue-on-collection-errors", "--rootdir", root]
        code = pytest.main([*options, *run["args"]], plugins=[hooks])
        check()
        send({"end": int(code)})
        sys.stdout.flush()  # the log's last lines name the failures
    finally:
        os._exit(0)


def _fingerprint() -> Fingerprint:
    """The identity of every function of the guarded modules and their classes."""
    found: Fingerprint = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in GUARDED:
            continue
        found[(name,)] = (id(module),)
        for key, value in list(vars(module).items()):
            if key in VARIABLE or not isinstance(value, KINDS):
                continue
            found[name, key] = _identity(value)
            if isinstance(value, type) and value.__module__ == name:
                for attribute, member in list(vars(value).items()):
                    if isinstance(member, KINDS):
                        found[name, key, attribute] = _identity(member)
    return found


def _identity(value: Any) -> tuple[int, ...]:
    if type(value) is types.FunctionType:  # the most frequent kind
        return id(value), id(value.__code__), id(value.__defaults__)
    inner = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
    return id(value), id(getattr(inner, "__code__", None)), id(getattr(inner, "__defaults__", None))


def _difference(states: Sequence[Fingerprint], now: Fingerprint) -> str:
    """The first function that is not as in one of the states: replaced, added to a class, or removed. Empty if none is.

    By a function of pytest itself is fine: it has such patches, and a sentinel notices their abuse.
    """
    changed = [(key, identity) for key, identity in now.items() if all(each.get(key) != identity for each in states)]
    known = {identity[1] for each in states for identity in each.values() if identity[1:]} if changed else set()
    for key, identity in changed:
        replaced = any(key in each for each in states)
        added = not replaced and len(key) == 3 and any(key[:2] in each for each in states)
        if (added or replaced) and not (identity[1:] and identity[1] in known - {id(None)}):
            return f"{'.'.join(key)} was {'added' if added else 'replaced'}"
    gone = [key for key in states[0] if key not in now and all(key in each for each in states)]
    return f"{'.'.join(gone[0])} was removed" if gone else ""


if __name__ == "__main__":
    main()
