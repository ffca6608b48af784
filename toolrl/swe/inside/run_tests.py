"""Runs tests in a runtime and judges them, and prints what each test did.

    python -I -S run_tests.py REQUEST.json PLAN.json

`-S`: an environment's .pth files may name the repository, whose files a patch brings: its `sitecustomize`, or modules
that Python looks for and does not have. They count in the child alone.

Three kinds of processes, none of which can read another's memory:

    judge     this one: has the plan, with what tests expect. Never imports the repository's code.
    zygote    forked before the plan is read; has imported pytest, and forks one child for each run
    child     pytest with the patch. What the tests expect is not in it: toolrl/swe/held.py took it out of their files

Where a test had an assertion, the child sends the value as plain data, and the judge compares it. The answer is one
byte, so that the test goes on or fails as it would. A test passes if pytest in the child reports it, and if every check
that it cannot do without was reached and held; a wrong value is final, so that no patch can guess twice.
An object that is no plain data is compared by the child, with several candidates among which the judge hides what the
test expects: it must equal that one alone.
Standard library only, for any Python from 3.7 on.
"""

from __future__ import annotations

import builtins
import collections
import ctypes
import decimal
import fractions
import functools
import gc
import importlib
import importlib.util
import json
import math
import operator
import os
import pkgutil
import random
import re
import select
import signal
import site
import socket
import struct
import sys
import tempfile
import time
import types
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable, Sequence  # noqa: UP035  for Python 3.7

PR_SET_DUMPABLE = 4
CHUNK = 1 << 16
LENGTH = struct.Struct("!I")
MAX_FRAME_BYTES = 16 << 20
MAX_SENT = 50_000  # parts of a value; of a larger one only the truth is sent
MAX_REST_BYTES = 64 << 20  # that are still read of a run that has ended
SEND_S = 5.0  # a child that sends and does not read
LOG_BYTES = 4000  # of the end of the output
DECOYS = 7  # beside what a test expects
MOST_RAISED = 2  # builtin exceptions, besides their bases, that one exception may be
OK, WRONG, OPEN = b"1", b"0", b"?"
DISTINCT = ("eq", "almost", "has")  # predicates that few values fulfill
KINDS: tuple[Any, ...] = (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict)
COMPARES = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__bool__", "__len__", "__iter__",
            "__contains__", "__getitem__")  # fmt: skip
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "is": operator.is_,
    "is not": operator.is_not,
    "in": lambda value, expected: value in expected,
    "not in": lambda value, expected: value not in expected,
    "has": lambda value, expected: expected in value,
    "has not": lambda value, expected: expected not in value,
    "isinstance": isinstance,
    "almost": lambda value, expected: value == expected or round(abs(value - expected), 7) == 0,
    "true": lambda value, _: value,
}


def main() -> None:
    request, plan = (Path(name) for name in sys.argv[1:])
    settings = json.loads(request.read_text())
    request.unlink()
    sys.dont_write_bytecode = True
    prefix = _prefix()
    sys.path += site.getsitepackages([prefix])
    try:
        import pytest

        _preload("_pytest")
    except ImportError as error:
        sys.stdout.write(json.dumps({"problem": f"pytest cannot be imported: {error}"}))
        return
    own, place = f"{prefix}{os.sep}", str(pytest.__file__)  # an interpreter in the repository is no part of patches
    if place.startswith(settings["root"]) and not place.startswith(own):
        sys.stdout.write(json.dumps({"problem": "pytest is the repository's, which a patch can change"}))
        return
    # Compiled files in the repository are ignored, and those that a run leaves.
    sys.pycache_prefix = settings["compiled"] or os.devnull
    settings["has_xdist"] = importlib.util.find_spec("xdist") is not None
    _hide(0)
    channel, theirs = socket.socketpair()
    if os.fork() == 0:
        channel.close()
        gc.freeze()  # forks neither traverse nor copy what is loaded
        _zygote(theirs, settings, pytest)
    theirs.close()
    random.seed()  # the zygote has the former state
    held = json.loads(plan.read_text())  # after the fork: the zygote and its children do not have it
    plan.unlink()
    first, *rest = held["runs"]
    alone: list[dict[str, Any]] = []
    for run in rest:  # before the run of all, where a test that may fail can ask what others expect
        alone.append(_Run(channel, settings, held, run, pytest).judge())
        if any(alone[-1]["outcomes"].get(name) != "passed" for name in run["tests"]):
            break
    late = [each for each in alone if each["timeout"]]
    runs = late or [_Run(channel, settings, held, first, pytest).judge(), *alone]
    sys.stdout.write(json.dumps({"runs": runs}))


def _prefix() -> str:
    """The folder of the environment, virtual or not, which is known without `site` from Python 3.14 on alone."""
    folder = Path(sys.executable).parent.parent
    return str(folder) if (folder / "pyvenv.cfg").is_file() else sys.prefix


def _preload(package: str) -> None:
    """Modules that pytest would import later, when the repository could shadow or replace them."""
    for name in ("difflib", "pprint", "unittest.case", "unittest.mock", "doctest", "pdb", "logging", "traceback"):
        importlib.import_module(name)
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        try:
            importlib.import_module(module.name)
        except Exception:  # noqa: BLE001  an optional part
            continue


def _hide(dumpable: int) -> None:
    """0: other processes of this user can neither trace this one nor open its files."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, dumpable, 0, 0, 0)


def name_of(nodeid: str, wanted: set[str]) -> str:
    """Its node id, or a name of published rows: without the file (R2E-Gym), cut at a space, or with the end of a
    path as its parameter (SWE-bench)."""
    shorten = re.sub(r"\[/(?!/)[^*]*(/[^*/]*)\]", r"[\1]", nodeid)
    names = [".".join(nodeid.split("::")[1:]), nodeid.split(" ")[0], shorten]
    return next((name for name in names if name in wanted), nodeid)


# The judge


class _Run:
    """One run in a child, and what its tests did. An outcome counts only if the child ended regularly in time."""

    def __init__(
        self,
        zygote: socket.socket,
        settings: dict[str, Any],
        held: dict[str, Any],
        run: dict[str, Any],
        pytest: Any,
    ) -> None:
        self._zygote, self._settings, self._run = zygote, settings, run
        self._checks, self._needed = held["checks"], held["needed"]
        self._rows, self._guarded = held["rows"], held["guarded"]
        self._names = {"pytest": pytest, "approx": pytest.approx}
        self._wanted = {*run["tests"]}
        self._handlers: dict[str, Callable[..., bytes]] = {
            "begin": self._begin, "check": self._check, "opened": self._opened_object, "finish": self._finish,
            "end": self._end,
        }  # fmt: skip
        self._expected = functools.lru_cache(maxsize=None)(self._evaluate)
        self._test = ""  # that is running
        self._reached: set[str] = set()  # checks that held
        self._is_held = False  # it has sent a value that the judge compared
        self._wrong = ""
        self._asked: list[Any] = []  # the check that is open, and the place of what it expects
        self._tampered: list[str] = []
        self._failures: list[str] = []
        self._outcomes: dict[str, str] = {}
        self._held: set[str] = set()  # tests that passed with values that the judge compared
        self._opened: set[int] = set()  # checks of objects that are no plain data
        self._ended = False
        self._data = bytearray()

    def judge(self) -> dict[str, Any]:
        before = _states(self._guarded)
        mentions = functools.lru_cache(maxsize=None)(_mentions_failures)  # each file is read once in a run
        places = self._settings["root"], self._settings["files"]
        self._may_fail = {name for name in self._run["may_fail"] if _expects_failures(*places, name, mentions)}
        ours, theirs = socket.socketpair()
        with tempfile.TemporaryFile() as log:
            done = self._listen(ours, theirs, log.fileno())
            log.seek(max(0, log.seek(0, 2) - LOG_BYTES))
            printed = log.read().decode(errors="replace")
        if _states(self._guarded) != before:
            self._tampered.append("files of the tests were changed")
        return {
            "outcomes": self._outcomes,
            "held": sorted(self._held),
            "opened": sorted(self._opened),
            "ended": self._ended,
            "timeout": not done,
            "tampered": self._tampered,
            "log": "\n".join([printed, *self._failures[-20:]])[-LOG_BYTES:],
        }

    def _listen(self, ours: socket.socket, theirs: socket.socket, log: int) -> bool:
        """False after the time-out. The child's process group is killed."""
        deadline = time.monotonic() + self._run["timeout_s"]
        _send(self._zygote, {name: self._run[name] for name in ("args", "tests")}, [theirs.fileno(), log])
        theirs.close()
        pid = _receive(self._zygote)
        if pid is None:  # ended by the child before
            return True
        sources = [ours, self._zygote]
        done = False
        ours.settimeout(SEND_S)
        while not done and time.monotonic() < deadline:
            ready = select.select(sources, [], [], max(0.0, deadline - time.monotonic()))[0]
            done = self._zygote in ready
            if ours in ready and not self._read(ours):
                sources.remove(ours)
                ours.close()
        with suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
        _receive(self._zygote)  # that it has ended
        rest = MAX_REST_BYTES // CHUNK
        with suppress(OSError):
            while ours in sources and rest and select.select([ours], [], [], 0)[0] and self._read(ours):
                rest -= 1
        ours.close()
        return done

    def _read(self, ours: socket.socket) -> bool:
        """Take what the child has sent; False at its end."""
        try:
            data = ours.recv(CHUNK)
        except OSError:
            return False
        self._data += data
        while len(self._data) >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._data)
            if size > MAX_FRAME_BYTES:
                self._tampered.append("a message is too long")
                return False
            if len(self._data) < LENGTH.size + size:
                break
            frame = bytes(self._data[LENGTH.size : LENGTH.size + size])
            del self._data[: LENGTH.size + size]
            answer = self._answer(frame)
            if answer is None:
                return False
            if answer:
                try:
                    ours.sendall(answer)
                except OSError:  # it does not read
                    return False
        return bool(data)

    def _answer(self, frame: bytes) -> bytes | None:
        """None to a message that is none. Of what a child sends nothing is trusted."""
        try:
            what, *given = json.loads(frame)
            answer: bytes = self._handlers[what](*given)
            return answer
        except Exception as error:  # noqa: BLE001  whatever it sent
            self._tampered.append(f"a message that no test sends ({error!r})")
            return None

    def _begin(self, test: str) -> bytes:
        if self._test:  # it has not finished: what was wrong in it stays
            self._finish("missing")
        if name_of(str(test), self._wanted) not in self._wanted:
            raise ValueError(test)
        self._needs(str(test))
        self._test = str(test)
        return b""

    def _evaluate(self, source: str, test: str) -> Any:
        """test: with parameters, or empty"""
        row = {name: self._expected(each, "") for name, each in self._rows[test].items()} if test else {}
        return eval(source, {**self._names, **row}) if source else None  # noqa: S307  of the task's own tests

    def _check(self, number: int, sent: Any) -> bytes:
        if not self._test or self._asked:  # a value instead of an answer to candidates is a guess
            raise ValueError("no value is due")
        key = str(int(number))
        predicate = str(self._checks[key]["predicate"]).replace("not not ", "")
        negated = predicate.startswith("not ") and predicate not in OPERATORS
        plain = predicate[4:] if negated else predicate
        if plain == "reached":
            return self._decided(key, True, sent)
        try:
            expected = self._expected(self._checks[key]["expected"], self._test if self._test in self._rows else "")
        except Exception as error:  # noqa: BLE001  as it would be in the test
            return self._decided(key, False, error)
        if plain == "raises":
            if sent is not None and len(_leaves(sent[0])) > MOST_RAISED:
                self._tampered.append(f"{self._test}: an exception of every kind (line {self._checks[key]['line']})")
            return self._decided(key, sent is not None and _is_raised(sent, *expected), sent)
        if isinstance(sent, list) and sent[0] == "object":
            return self._object(key, sent, plain, negated, expected)
        value = decoded(sent)
        try:
            is_right = bool(OPERATORS[plain](value, expected)) is not negated
        except Exception:  # noqa: BLE001  as it would be in the test
            is_right = False
        return self._decided(key, is_right, value, held=plain in DISTINCT and not negated)

    def _object(self, key: str, sent: list[Any], predicate: str, negated: bool, expected: Any) -> bytes:
        """sent: names of its classes, and its truth"""
        _, classes, truth = sent
        if predicate == "true":
            return self._decided(key, truth is not None and bool(truth) is not negated, classes[:1])
        if predicate in ("is", "is not"):
            return self._decided(key, (predicate == "is not") is not negated, classes[:1])
        if predicate == "isinstance":
            kinds = expected if isinstance(expected, tuple) else (expected,)
            found = any(f"builtins.{kind.__name__}" in classes for kind in kinds)
            return self._decided(key, found is not negated, classes[:1])
        self._opened.add(int(key))
        own = spelled(expected) or self._checks[key]["expected"]
        sources = [own, *decoys(expected)] if predicate == "eq" and not negated else [own]
        random.shuffle(sources)
        self._asked = [key, sources.index(own)]
        text = json.dumps([predicate, negated, sources]).encode()
        return OPEN + LENGTH.pack(len(text)) + text

    def _opened_object(self, results: list[Any]) -> bytes:
        key, place = self._asked
        self._asked = []
        others = [each is True for number, each in enumerate(results) if number != place]
        if results[place] is True and others and all(others):
            self._tampered.append(f"{self._test}: an object equals every value (line {self._checks[key]['line']})")
        return self._decided(key, results[place] is True and sum(others) <= 1, "an object")

    def _decided(self, key: str, is_right: bool, value: Any, held: bool = False) -> bytes:
        if is_right:
            self._reached.add(key)
            self._is_held = self._is_held or held
            return OK
        check = self._checks[key]
        self._wrong = f"line {check['line']}: {str(value)[:200]} is not {check['predicate']} {check['expected'][:200]}"
        return WRONG

    def _finish(self, outcome: str) -> bytes:
        name, test = name_of(self._test, self._wanted), self._test
        if not test:
            raise ValueError("no test runs")
        missing = self._needs(test) - self._reached
        if self._asked:  # candidates that it has seen and not compared
            self._wrong = self._wrong or f"line {self._checks[self._asked[0]]['line']}: an object is not compared"
        if self._wrong:
            self._failures.append(f"{test} {self._wrong}")
        if outcome == "passed" and (self._wrong or missing):
            outcome = "failed"
            if not self._wrong:
                lines = sorted(self._checks[each]["line"] for each in missing)
                self._tampered.append(f"{test} passed without its line {lines[0]}")
        if outcome == "xfailed" and name in self._may_fail:
            outcome = "passed"
        if self._outcomes.get(name, "passed") == "passed":  # one name may stand for several tests
            self._outcomes[name] = outcome
        if outcome == "passed" and self._is_held:
            self._held.add(name)
        self._test, self._reached, self._is_held, self._wrong, self._asked = "", set(), False, "", []
        return b""

    def _needs(self, test: str) -> set[str]:
        """Raises ValueError for a test that is none, or is in another file: for short names many would do."""
        file, _, rest = test.partition("::")
        function = rest.partition("[")[0]
        is_elsewhere = any(function in tests for tests in self._needed.values())
        if file not in self._needed or not re.match(r"\w+(::\w+)*$", function):
            raise ValueError(test)
        if test not in self._wanted and is_elsewhere and function not in self._needed[file]:
            raise ValueError(test)
        return {str(each) for each in self._needed[file].get(function, ())}

    def _end(self) -> bytes:
        self._ended = True
        return b""


def _is_raised(sent: Any, expected: Any, pattern: str) -> bool:
    classes, text = sent
    kinds = expected if isinstance(expected, tuple) else (expected,)
    found = any(f"builtins.{kind.__name__}" in classes for kind in kinds)
    return found and (pattern is None or re.search(pattern, text) is not None)


def _leaves(classes: Sequence[str]) -> list[Any]:
    """The builtin exceptions among the names of classes that are no bases of others."""
    named = [getattr(builtins, each[len("builtins.") :], None) for each in classes if each.startswith("builtins.")]
    kinds = {each for each in named if isinstance(each, type) and issubclass(each, BaseException)}
    return [each for each in kinds if not any(other is not each and issubclass(other, each) for other in kinds)]


def decoded(sent: Any) -> Any:
    """A value of builtin types. Raises ValueError."""
    if not isinstance(sent, list):
        return sent
    kind, given = sent
    if kind == "dict":
        return {decoded(key): decoded(value) for key, value in given}
    if kind in ("list", "tuple", "set", "frozenset"):
        return getattr(builtins, kind)(map(decoded, given))
    if kind == "int":
        return int(given, 16)
    if kind == "fraction":
        return fractions.Fraction(*map(decoded, given))
    if kind == "decimal":
        return decimal.Decimal(given)
    if kind == "bytes":
        return given.encode("latin-1")
    if kind == "complex":
        return complex(*given)
    raise ValueError(kind)


def spelled(expected: Any) -> str:
    """A source that does not differ from those of other values by its style; empty if there is none."""
    if type(expected).__name__ == "ApproxScalar":
        return f"(approx({expected.expected!r}, rel={expected.rel!r}, abs={expected.abs!r}))"
    with suppress(Exception):
        if eval(repr(expected), {}) == expected:  # noqa: S307  of the task's own tests
            return f"({expected!r})"
    return ""


def decoys(expected: Any) -> list[str]:
    """Sources of other values of the same kind. Each changes another one, so that none is in the middle of all."""
    is_near = type(expected).__name__ == "ApproxScalar"
    found = [expected.expected if is_near else expected]
    for _ in range(50 * DECOYS):
        changed = _changed(random.choice(found))
        if len(found) <= DECOYS and not any(changed == each for each in found):
            found.append(changed)
    return [
        f"(approx({each!r}, rel={expected.rel!r}, abs={expected.abs!r}))" if is_near else f"({each!r})"
        for each in found[1:]
    ]


def _changed(value: Any) -> Any:
    """A value that differs a little."""
    if isinstance(value, bool) or value is None:
        return random.choice([True, False, None])
    if isinstance(value, (int, float)):
        step = random.choice([1, 2, 3, 7, max(1, int(abs(value)) // 3 if math.isfinite(value) else 1)])
        return value + random.choice([-step, step])
    if isinstance(value, bytes):
        return str(_changed(value.decode("latin-1"))).encode("latin-1")
    if isinstance(value, str):
        place = random.randrange(len(value) + 1)
        return value[:place] + random.choice(value or "ab") + value[place + random.choice([0, 1, 2]) :]
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [*value]
        place = random.randrange(len(items) + 1)
        new = [_changed(items[place - 1])] if items else [random.randrange(9)]
        items[place : place + random.choice([0, 1])] = random.choice([new, new, []])
        return type(value)(items)
    if isinstance(value, dict):
        key = random.choice([*value]) if value else random.randrange(9)
        return {**value, key: _changed(value[key]) if key in value else random.randrange(9)}
    return random.randrange(1 << 16)


def _expects_failures(root: str, files: Sequence[str], name: str, mentions: Callable[[Path], bool]) -> bool:
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


def _states(files: Sequence[str]) -> list[Any]:
    """Another one for a file that was written, even if it has its former content and times again."""
    found: list[Any] = []
    for name in files:
        try:
            state = os.stat(name)  # noqa: PTH116  no code but that of the interpreter
            found.append((state.st_ino, state.st_size, state.st_ctime_ns))
        except OSError:
            found.append(())
    return found


# Messages: a length, then JSON


def _send(channel: socket.socket, message: Any, descriptors: Sequence[int] = ()) -> None:
    data = json.dumps(message).encode()
    data = LENGTH.pack(len(data)) + data
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(descriptors)}i", *descriptors))]
    sent = channel.sendmsg([data], rights if descriptors else [])
    channel.sendall(data[sent:])


def _receive(channel: socket.socket, descriptors: int = 0) -> Any:
    """A message; with descriptors (message, descriptors). None at the end."""
    rights = socket.CMSG_SPACE(struct.calcsize(f"{descriptors}i"))
    data, control, _, _ = channel.recvmsg(LENGTH.size, rights if descriptors else 0)
    while 0 < len(data) < LENGTH.size:
        data += channel.recv(LENGTH.size - len(data)) or b"\0" * LENGTH.size
    if not data:
        return None
    rest = bytearray()
    (size,) = LENGTH.unpack_from(data)
    while len(rest) < size:
        part = channel.recv(min(CHUNK, size - len(rest)))
        if not part:
            return None
        rest += part
    message = json.loads(bytes(rest))
    if descriptors:
        return message, [*struct.unpack(f"{descriptors}i", control[0][2])]
    return message


# The zygote


def _zygote(channel: socket.socket, settings: dict[str, Any], pytest: Any) -> None:
    """Fork a child for each request, and report its end. Never returns."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    with suppress(BaseException):
        while True:
            request = _receive(channel, 2)
            if request is None:
                break
            run, (judge, log) = request
            pid = os.fork()
            if pid == 0:
                channel.close()
                _run_pytest(settings, run, pytest, judge, log)
            os.close(judge)
            os.close(log)
            _send(channel, pid)
            os.waitpid(pid, 0)
            _send(channel, "ended")
    os._exit(0)


# The child: whatever is here, the code under test can change


class Held:
    """`__held__` in tests: sends a value to the judge, and raises if it is not what the test expects.

    It keeps the functions that it uses, because tests may patch them.
    """

    def __init__(self, judge: int, pytest: Any) -> None:
        self._judge, self._pytest = judge, pytest
        self._owner, self._getpid = os.getpid(), os.getpid
        self._read, self._write, self._dumps, self._loads = os.read, os.write, json.dumps, json.loads

    def __call__(self, number: int, value: object = None) -> None:
        __tracebackhide__ = True
        if self._getpid() != self._owner:
            return  # a process of the test, whose parent reports
        self.send("check", number, self._encoded(value))
        answer = self._take(1)
        if answer == OPEN:
            predicate, negated, sources = self._loads(self._take(LENGTH.unpack(self._take(LENGTH.size))[0]))
            self.send("opened", [self._compared(value, predicate, negated, source) for source in sources])
            answer = self._take(1)
        if answer != OK:
            raise AssertionError("it is not what the test expects")

    def raises(self, number: int, case: Any = None) -> Any:
        """In place of pytest.raises, or of a test case's assertRaises."""
        return _Raises(self, number, case, self._pytest)

    def within(self, number: int, manager: Any) -> Any:
        """Around a context manager that expects an exception that only the child knows."""
        return _Within(self, number, manager)

    def send(self, *message: Any) -> None:
        data = self._dumps(message).encode()
        data = LENGTH.pack(len(data)) + data
        while data:
            data = data[self._write(self._judge, data) :]

    def is_expected(self, number: int, error: Any) -> bool:
        """Whether the test expects this exception, or None."""
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        self.send("check", number, None if error is None else [_classes(type(error)), text])
        return self._take(1) == OK

    def _take(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self._read(self._judge, size - len(data))
            if not part:
                raise EOFError("the judge has gone")
            data += part
        return data

    def _encoded(self, value: object) -> Any:
        try:
            return encoded(value, [MAX_SENT])
        except (_NotPlainError, RecursionError):
            pass
        try:
            return ["object", _classes(type(value)), bool(value)]
        except Exception:  # noqa: BLE001  it has none, as an array of numbers
            return ["object", _classes(type(value)), None]

    def _compared(self, value: object, predicate: str, negated: bool, source: str) -> bool:
        names = {"pytest": self._pytest, "approx": self._pytest.approx}
        try:
            return bool(OPERATORS[predicate](value, eval(source, names))) is not negated  # noqa: S307  the judge's
        except Exception:  # noqa: BLE001  as in the test, which then fails
            return False


class _Raises:
    def __init__(self, held: Held, number: int, case: Any, pytest: Any) -> None:
        self._held, self._number, self._case = held, number, case
        self._manager = pytest.raises(BaseException) if case is None else case.assertRaises(BaseException)

    def __enter__(self) -> Any:
        return self._manager.__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        __tracebackhide__ = True
        if not self._held.is_expected(self._number, error):
            if error is None:
                raise AssertionError("DID NOT RAISE")
            return False
        return bool(self._manager.__exit__(kind, error, trace))


class _Within:
    def __init__(self, held: Held, number: int, manager: Any) -> None:
        self._held, self._number, self._manager = held, number, manager

    def __enter__(self) -> Any:
        return self._manager.__enter__()

    def __exit__(self, *error: Any) -> bool:
        __tracebackhide__ = True
        swallows = bool(self._manager.__exit__(*error))
        if swallows:
            self._held(self._number)
        return swallows


class _NotPlainError(Exception):
    pass


def encoded(value: Any, left: list[int]) -> Any:
    """For JSON, with the type. left: how many parts may still be sent. Raises _NotPlainError."""
    left[0] -= 1
    if left[0] < 0:
        raise _NotPlainError
    kind = type(value)
    if value is None or kind is bool or kind is str or kind is float:
        return value
    if kind is int:
        return value if -(1 << 60) < value < 1 << 60 else ["int", hex(value)]
    if kind is list or kind is tuple:
        return [kind.__name__, [encoded(each, left) for each in value]]
    if kind is dict:
        return ["dict", [[encoded(key, left), encoded(each, left)] for key, each in value.items()]]
    if kind is set or kind is frozenset:
        return [kind.__name__, [encoded(each, left) for each in value]]
    if kind is bytes:
        return ["bytes", value.decode("latin-1")]
    if kind is complex:
        return ["complex", [value.real, value.imag]]
    if kind is fractions.Fraction:
        return ["fraction", [encoded(value.numerator, left), encoded(value.denominator, left)]]
    if kind is decimal.Decimal:
        return ["decimal", str(value)]
    if kind.__module__ == "numpy" and getattr(value, "shape", None) == ():  # a number of numpy's
        return encoded(value.item(), left)
    for base in KINDS:  # a subclass that compares as its base
        if isinstance(value, base):
            own = kind.__mro__[: kind.__mro__.index(base)]
            same = not any(name in vars(each) for each in own for name in COMPARES)
            if same or kind in (collections.OrderedDict, collections.Counter):
                return encoded(_as_base(base, value), left)
    raise _NotPlainError


def _as_base(base: Any, value: Any) -> Any:
    if base in (str, bytes):
        return base.__getitem__(value, slice(None))
    if base in (int, float):
        return base.__add__(value, base())
    return base(value) if base is not complex else complex(value.real, value.imag)


def _classes(kind: type) -> list[str]:
    return [f"{each.__module__}.{each.__name__}" for each in kind.__mro__]


def _run_pytest(settings: dict[str, Any], run: dict[str, Any], pytest: Any, judge: int, log: int) -> None:
    """Run pytest in this child, with hooks that report. Never returns."""
    os.setsid()
    _hide(1)
    sys.modules["__main__"] = types.ModuleType("__main__")  # as tests expect: without names of ours
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)
    root, wanted = settings["root"], set(run["tests"])
    held = Held(judge, pytest)
    phases: dict[str, dict[str, str]] = {}

    def pytest_load_initial_conftests(early_config: Any) -> None:
        """The environment's plugins are loaded. The repository becomes importable only now: no file of it is a plugin
        by its metadata."""
        sys.path[:0] = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]  # -I ignored it

    def pytest_collection_modifyitems(items: list[Any]) -> None:
        items[:] = [item for item in items if name_of(item.nodeid, wanted) in wanted]

    def pytest_runtest_logstart(nodeid: str) -> None:
        held.send("begin", nodeid)

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
        held.send("finish", bad[0] if bad else "passed" if "call" in ended else "missing")

    hooks = types.ModuleType("hooks")
    vars(hooks).update(
        pytest_load_initial_conftests=pytest_load_initial_conftests,
        pytest_collection_modifyitems=pytest_collection_modifyitems,
        pytest_runtest_logstart=pytest_runtest_logstart,
        pytest_runtest_logreport=pytest_runtest_logreport,
        pytest_runtest_logfinish=pytest_runtest_logfinish,
    )
    builtins.__held__ = held  # type: ignore[attr-defined]
    try:
        sys.path[:] = [each for each in sys.path if each not in site.getsitepackages([_prefix()])]
        site.main()
        os.chdir(root)
        sys.argv = ["pytest"]
        options = ["-o", f"cache_dir={tempfile.gettempdir()}/cache-{os.getpid()}", "--continue-on-collection-errors"]
        options += ["--rootdir", root, "--maxfail", "0"]
        options += ["-n", "0"] if settings["has_xdist"] else []
        pytest.main([*options, *run["args"]], plugins=[hooks])
        held.send("end")
        sys.stdout.flush()  # the log's last lines name the failures
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
