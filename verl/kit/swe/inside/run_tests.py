"""Runs tests in a runtime, each run in a fork of this process, and prints what each test did.

    python -I run_tests.py REQUEST.json

This process imports pytest and never the repository's code. It hides itself from its forks, and prints only what a fork
reported with its token before its regular end. Each run has a sentinel file of its own. The runs after
the first need all of its tests to pass. The code under test shares a process with pytest, so a fork also reports
whether functions of pytest, unittest or the interpreter were replaced, plugins were added or test files changed. What
reports uses no code of modules that the code under test can change.
Standard library only, for any Python from 3.7 on.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import functools
import gc
import importlib
import importlib.machinery
import importlib.util
import json
import os
import pkgutil
import re
import select
import signal
import sys
import tempfile
import time
import types
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable, Dict, Sequence, Tuple  # noqa: UP035  for Python 3.7

GUARDED = ("_pytest", "pytest", "pluggy", "unittest", "builtins", "sys", "os", "posix", "posixpath", "time", "atexit",
           "signal", "json", "importlib", "re", "difflib", "math", "operator", "contextlib", "inspect", "ast", "io",
           "pathlib", "marshal", "tokenize")  # fmt: skip
# Set by pytest itself while it runs, or by harmless code, as the length of messages is.
VARIABLE = ("excepthook", "unraisablehook", "displayhook", "breakpointhook", "__interactivehook__",
            "_reprcompare", "_assertion_pass", "_", "maxDiff", "_diffThreshold", "_MAX_LENGTH")  # fmt: skip
Fingerprint = Dict[Tuple[str, ...], Tuple[int, ...]]  # noqa: UP006
COMPARED_FULLY = ("_pytest", "pytest", "pluggy", "unittest")  # of these modules not functions alone
BUILTINS = frozenset(dir(builtins))
KINDS = (types.FunctionType, types.BuiltinFunctionType, classmethod, staticmethod, property, type)
PR_SET_DUMPABLE = 4
CHUNK = 1 << 16
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
    own, place = f"{sys.prefix}{os.sep}", str(pytest.__file__)  # an interpreter in the repository is no part of patches
    if place.startswith(request["root"]) and not place.startswith(own):
        sys.stdout.write(json.dumps({"problem": "pytest is the repository's, which a patch can change"}))
        return
    # Compiled files in the repository are ignored, and those that a run leaves.
    sys.pycache_prefix = request["compiled"] or os.devnull
    request["has_xdist"] = importlib.util.find_spec("xdist") is not None
    gc.freeze()  # forks neither traverse nor copy what is loaded
    _set_dumpable(0)
    first, *rest = request["runs"]
    original = _fingerprint()  # the same in forks
    runs = [_run(request, first, pytest, original)]
    if all(runs[0]["outcomes"].get(name) == "passed" for name in first["tests"]):
        runs += [_run(request, run, pytest, original) for run in rest]
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


def _run(request: dict[str, Any], run: dict[str, Any], pytest: Any, original: Fingerprint) -> dict[str, Any]:
    """One run in a fork; its outcomes count only if it ended regularly in time."""
    reads, writes = os.pipe()
    token = os.urandom(16).hex()
    log = tempfile.TemporaryFile()  # noqa: SIM115  also of the fork
    sentinel, files = Path(run["sentinel"]), [*request["guarded"], run["sentinel"]]
    sentinel.parent.mkdir(parents=True, exist_ok=True)
    sentinel.write_text(run["text"])
    before = _states(files)
    mentions = functools.lru_cache(maxsize=None)(_mentions_failures)  # each file is read once in a run
    may_fail = {
        name for name in run["may_fail"] if _expects_failures(request["root"], name, request["files"], mentions)
    }
    pid = os.fork()
    if pid == 0:
        os.close(reads)
        _run_pytest(request, files, run, pytest, original, writes, token, log.fileno())
    os.close(writes)
    data, code = _wait(pid, reads, run["timeout_s"])
    reported: dict[str, list[str]] = {"end": [], "tampered": []}
    outcomes: dict[str, str] = {}
    for line in data.decode(errors="replace").splitlines():
        start, _, rest = line.partition(" ")
        if start == token:
            what, _, quoted = rest.partition(" ")
            reported.setdefault(what, []).append(ast.literal_eval(quoted))
    for outcome in [each for each in reported if each not in ("end", "tampered")]:
        for name in reported[outcome]:
            counted = "passed" if outcome == "xfailed" and name in may_fail else outcome
            if outcomes.get(name, "passed") == "passed":  # one name may stand for several tests
                outcomes[name] = counted
    log.seek(max(0, log.seek(0, 2) - LOG_BYTES))
    tampered = reported["tampered"]
    if _states(files) != before:
        tampered.append("files of the tests were changed")
    with suppress(OSError):
        sentinel.unlink()
    return {
        "outcomes": outcomes,
        "ended": bool(reported["end"]),
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


def _states(files: Sequence[str]) -> list[tuple[int, ...]]:
    """Another one for a file that was written, even if it has its former content and times again."""
    found: list[tuple[int, ...]] = []
    for name in files:
        try:
            state = os.stat(name)  # noqa: PTH116  no code but that of the interpreter
            found.append((state.st_ino, state.st_size, state.st_ctime_ns))
        except OSError:
            found.append(())
    return found


def _expects_failures(root: str, name: str, files: Sequence[str], mentions: Callable[[Path], bool]) -> bool:
    """Whether the file of a test, or a conftest.py of its folders, mentions expected failures."""
    paths = [Path(root, name.partition("::")[0])] if "::" in name else [Path(each) for each in files]
    settings = [
        folder / "conftest.py" for path in paths for folder in path.parents if Path(root) in (folder, *folder.parents)
    ]
    return any(map(mentions, [*paths, *settings]))


def _mentions_failures(path: Path) -> bool:
    with suppress(OSError):
        return re.search(rb"xfail|expectedFailure", path.read_bytes()) is not None
    return False


def _run_pytest(
    request: dict[str, Any],
    files: list[str],
    run: dict[str, Any],
    pytest: Any,
    original: Fingerprint,
    writes: int,
    token: str,
    log: int,
) -> None:
    """Run pytest in this fork, with hooks that report. Never returns.

    The code under test shares the process. So what reports is in closures that the garbage collector does not list.
    """
    os.setsid()
    _set_dumpable(1)
    sys.modules["__main__"] = types.ModuleType("__main__")  # the names that are used here are not there
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((nothing, log, log)):
        os.dup2(descriptor, number)
    root, changed, wanted = request["root"], frozenset(request["changed"]), frozenset(run["wanted"])
    shorten = re.compile(r"\[/(?!/)[^*]*(/[^*/]*)\]").sub
    phases: dict[str, dict[str, str]] = {}
    known: set[int] = set()  # plugins
    write, fingerprint, difference, unknown_hook_files, states_of = (
        os.write,
        _fingerprint,
        _difference,
        _unknown_hook_files,
        _states,
    )
    before, states = states_of(files), [original]

    def send(what: str, name: str) -> None:
        """what: "tampered", "end" or the outcome of a test"""
        write(writes, f"{token} {what} {name!a}\n".encode())

    def check() -> None:
        """When all tests are collected, and when all have ended: what they patch meanwhile is their own."""
        found = difference(states, fingerprint())
        if found:
            send("tampered", found)
        check_files()

    def check_files() -> None:
        if states_of(files) != before:
            send("tampered", "files of the tests were changed")

    def name_of(nodeid: str) -> str:
        """Its node id, or a name of published rows: without the file (R2E-Gym), cut at a space, or with the end of a
        path as its parameter (SWE-bench)."""
        names = [".".join(nodeid.split("::")[1:]), nodeid.split(" ")[0], shorten(r"[\1]", nodeid)]
        return next((name for name in names if name in wanted), nodeid)

    def pytest_load_initial_conftests(early_config: Any) -> None:
        """The environment's plugins are loaded, and patched pytest if they do. The repository becomes importable only
        now: no file of it is a plugin by its metadata."""
        states.append(fingerprint())
        sys.path[:0] = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]  # -I ignored it
        known.update(map(id, early_config.pluginmanager.get_plugins()))

    def pytest_configure(config: Any) -> None:
        config.getini("python_functions").append("test_")  # of the sentinels

    def pytest_collectstart(collector: Any) -> None:
        if isinstance(collector, pytest.Module):
            check_files()

    def pytest_collection_modifyitems(items: list[Any]) -> None:
        items[:] = [item for item in items if name_of(item.nodeid) in wanted]

    def pytest_collection_finish(session: Any) -> None:
        check()
        for plugin in session.config.pluginmanager.get_plugins():
            unknown = unknown_hook_files(plugin, root, changed) if plugin is not hooks else ()
            added = [file for file in unknown if id(plugin) not in known or file in changed]
            if added:
                send("tampered", f"a plugin was added: {added[0]}")

    def pytest_runtest_logreport(report: Any) -> None:
        if report.outcome == "skipped" and hasattr(report, "wasxfail"):
            outcome = "xfailed"
        elif report.outcome == "failed" and report.when != "call":
            outcome = "error"
        else:
            outcome = report.outcome
        phases.setdefault(report.nodeid, {})[report.when] = outcome

    def pytest_runtest_logfinish(nodeid: str) -> None:
        ended = phases.pop(nodeid, {})
        bad = [each for each in ended.values() if each != "passed"]
        complete = "call" in ended or bad
        send(bad[0] if bad else "passed" if complete else "missing", name_of(nodeid))

    hooks = types.ModuleType("hooks")
    vars(hooks).update(
        pytest_load_initial_conftests=pytest_load_initial_conftests,
        pytest_configure=pytest_configure,
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
        options = ["-o", f"cache_dir={tempfile.gettempdir()}/cache-{os.getpid()}", "--continue-on-collection-errors"]
        options += ["--rootdir", root, "--maxfail", "0"]
        options += ["-n", "0"] if request["has_xdist"] else []
        code = pytest.main([*options, *run["args"]], plugins=[hooks])
        check()
        send("end", str(int(code)))
        sys.stdout.flush()  # the log's last lines name the failures
    finally:
        os._exit(0)


def _unknown_hook_files(plugin: Any, root: str, changed: frozenset[str]) -> list[str]:
    """The files of its hooks, but for those of installed packages and of the repository without the patch.

    A wrapper of the standard library hides whose code it calls.
    """
    names = [name for name in dir(plugin) if name.startswith("pytest_")]
    hooks = [hook for hook in (getattr(plugin, name, None) for name in names) if callable(hook)]
    files = [str(getattr(getattr(hook, "__code__", None), "co_filename", "")) for hook in hooks]

    def is_fine(file: str) -> bool:
        installed = file.startswith((sys.prefix, sys.base_prefix)) and "-packages" in file
        return installed or (file.startswith(root) and file not in changed)

    return [file or repr(type(plugin)) for file in files if not is_fine(file)]


def _fingerprint() -> Fingerprint:
    """The identity of what guarded modules and their classes hold: functions, numbers, texts and the like."""
    found: Fingerprint = {("sys", "meta_path"): _finders()}
    for name, module in list(sys.modules.items()):
        package = name.partition(".")[0]
        if package not in GUARDED:
            continue
        found[(name,)] = (id(module),)
        for key, value in list(vars(module).items()):
            fixed = _is_fixed(value) if package in COMPARED_FULLY else isinstance(value, KINDS)
            if key in VARIABLE or not (fixed or key in BUILTINS):
                continue
            found[name, key] = _identity(value)
            if isinstance(value, type) and value.__module__ == name:
                for attribute, member in list(vars(value).items()):
                    if attribute not in VARIABLE and _is_fixed(member):
                        found[name, key, attribute] = _identity(member)
    return found


def _is_fixed(value: Any) -> bool:
    """Not a flag, a container or an object that holds a state."""
    plain = isinstance(value, (int, float, str)) and not isinstance(value, bool)
    return plain or callable(value) or hasattr(type(value), "__get__")


def _finders() -> tuple[int, ...]:
    """What finds modules before their files are looked for."""
    found: list[int] = []
    for finder in sys.meta_path:
        found.append(id(finder))
        if finder is importlib.machinery.PathFinder:
            break
    return tuple(found)


def _identity(value: Any) -> tuple[int, ...]:
    if type(value) is types.FunctionType:  # the most frequent kind
        return id(value), id(value.__code__), id(value.__defaults__)
    if not isinstance(value, KINDS):
        return (id(value),)
    inner = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
    return id(value), id(getattr(inner, "__code__", None)), id(getattr(inner, "__defaults__", None))


def _difference(states: Sequence[Fingerprint], now: Fingerprint) -> str:
    """The first function that is not as in one of the states: replaced, added to a class, or removed. Empty if none is.

    By a function of pytest itself is fine: it has such patches, and a sentinel notices their abuse.
    """
    if now in states:
        return ""
    changed = [(key, identity) for key, identity in now.items() if all(each.get(key) != identity for each in states)]
    known = {identity[1] for each in states for identity in each.values() if identity[1:]} if changed else set()
    for key, identity in changed:
        replaced = any(key in each for each in states)
        new = len(key) == 3 or (len(key) == 2 and key[1] in BUILTINS)
        added = not replaced and new and any(key[:-1] in each for each in states)
        if (added or replaced) and not (identity[1:] and identity[1] in known - {id(None)}):
            return f"{'.'.join(key)} was {'added' if added else 'replaced'}"
    gone = [key for key in states[0] if key not in now and all(key in each for each in states)]
    return f"{'.'.join(gone[0])} was removed" if gone else ""


if __name__ == "__main__":
    main()
