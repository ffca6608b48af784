"""What tests expect is no longer in their source, and what the judge gets is what they compared."""

from __future__ import annotations

import ast
import gc
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from toolrl.swe.held import Check, HeldFile, hold, hold_tests
from toolrl.swe.inside import run_tests

FILE = '''import pytest
import unittest
from calc import MyError, add, size


def test_add():
    """Adds."""
    assert add(1, 2) == 1234, "sum"
    assert (add(1,
                2) ==
            [1234,  # the first
             5678]); y = 1
    assert not add(0, 0)
    assert 1234 in add(1, 2)
    assert add(0.1, 0.2) == pytest.approx(0.1234, rel=1e-9)
    with pytest.raises(ValueError, match="a+1234"):
        add()
    with pytest.raises(MyError):
        add(None, None)


def test_both():
    assert add(1, 2) == add(2, 1)
    if y:
        return
    assert add(1, 2) == 1234


class TestAdd(unittest.TestCase):
    def test_zero(self):
        self.assertEqual(1234, add(0, 5))
        with self.assertRaises(KeyError):
            add()


class TestMore(TestAdd):
    def helper(self):
        assert add(1, 2) == 3


def test_smoke():
    add(1, 2)


def test_own():
    try:
        assert add(1, 2) == 9
    except AssertionError:
        pass
'''


def held(body: str) -> HeldFile:
    return hold(
        "import pytest\nfrom calc import f\ndef test_f(self=0):\n    " + body.replace("\n", "\n    ") + "\n", [], 0
    )


def test_expected_values_are_removed_and_line_numbers_stay() -> None:
    found = hold(FILE, [], 10)
    ast.parse(found.source)
    assert "1234" not in found.source and "KeyError" not in found.source and "ValueError" not in found.source
    before, after = FILE.splitlines(), found.source.splitlines()
    assert len(before) == len(after) and '"""Adds."""' in found.source and "; y = 1" in found.source
    assert [number for number, line in enumerate(before) if line.startswith(("def", "class"))] == [
        number for number, line in enumerate(after) if line.startswith(("def", "class"))
    ]
    assert found.checks[10] == Check(8, "eq", "(1234)")
    assert [check.predicate for check in found.checks.values()] == [
        *("eq", "eq", "not true", "has", "eq", "raises", "reached"), *("true", "eq"), *("eq", "raises"),
        *("reached",),
    ]  # fmt: skip
    assert found.needed == {
        "test_add": [*range(10, 17)],
        "test_both": [17],
        "TestAdd::test_zero": [19, 20],
        "TestMore::test_zero": [19, 20],
        "test_smoke": [21],
        "test_own": [],
    }


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("assert f() is None", Check(4, "is", "(None)")),
        ("assert not f() in {1, 2}", Check(4, "not in", "({1, 2})")),
        ("assert 3 < f()", Check(4, "gt", "(3)")),
        ("assert isinstance(f(), (int, str))", Check(4, "isinstance", "((int, str))")),
        ("assert f() == list(range(3))", Check(4, "eq", "(list(range(3)))")),
        ("assert f() == 1 or f() == 2", Check(4, "true", "")),
        ("assert f() is 1000", Check(4, "true", "")),
        ("self.assertAlmostEqual(f(), 0.5)", Check(4, "almost", "(0.5)")),
        ("self.assertTrue(f() == 3)", Check(4, "eq", "(3)")),
        ("self.assertNotEqual(f(), f(1))", Check(4, "true", "")),
        ("with pytest.raises(IOError):\n    f()", Check(4, "raises", "((IOError), None)")),
        ("with pytest.raises(f):\n    f()", Check(4, "reached", "")),
        ("for each in [1, 2]:\n    assert f(each) == 3", Check(5, "eq", "(3)")),
    ],
)
def test_each_kind_of_assertion(source: str, expected: Check) -> None:
    found = held(source)
    ast.parse(found.source)
    assert (found.checks, found.needed) == ({0: expected}, {"test_f": [0]})


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("want = 1234\nassert f() == want", ["eq (((1234)))"]),
        ("want = [1234,\n    1234]\nassert f() == want, f'not {want}'", ["eq (((1234)))"]),
        ("want = 1234\nassert f() == want\nwant = 12345\nself.assertEqual(want, f())", ["eq (((1234)))", "eq (12345)"]),
        ("text = '1234'\nwith pytest.raises(ValueError, match=text):\n    f()", ["raises"]),
        ("want = 1234\nassert f() == pytest.approx(want, rel=1e-3)", ["eq"]),
        ("with f():\n    want = 1234\n    assert f() == {'a': want}", ["eq"]),
        ("for each in [1, 2]:\n    want = 1234\n    assert f(each) > want", ["gt"]),
        ("want = None\nassert f() is want", ["is"]),
    ],
)
def test_local_names_of_constants_are_taken_out(body: str, expected: list[str]) -> None:
    found = held(body)
    compile(found.source, "t.py", "exec")
    assert "1234" not in found.source and found.source.count("\n") == body.count("\n") + 4
    assert [check.predicate for check in found.checks.values()] == [each.partition(" ")[0] for each in expected]
    assert not {"want", "text"} & {
        node.id for check in found.checks.values() for node in ast.walk(ast.parse(check.expected))
        if isinstance(node, ast.Name)
    }  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [
        "want = 1234\nassert f(want) == want",
        "want = [1234]\nwant.append(1)\nassert f() == want",
        "want = 1234\nfor each in [1, 2]:\n    assert f() == want\n    want = f()",
        "if f():\n    want = 1234\nelse:\n    want = 1\nassert f() == want",
        "want = 1234\nwant += 1\nassert f() == want",
        "want = 1234\ndef inner():\n    return want\nassert f() == want",
        "want = 1234\nassert f() == want\nf(locals())",
        "want = [1234, f()]\nassert f() == want",
        "want = other = 1234\nassert f() == want",
        "want: int = 1234\nassert f() == want",
        "def inner():\n    nonlocal want\n    want = 1\nwant = 1234\ninner()\nassert f() == want",
        "want = 1234\ntry:\n    assert f() == want\nexcept AssertionError:\n    pass",
    ],
)
def test_names_that_are_more_than_an_expectation_stay(body: str) -> None:
    found = held(body)
    compile(found.source, "t.py", "exec")
    assert "1234" in found.source and "want" not in "".join(check.expected for check in found.checks.values())


ROWS = """import pytest
from calc import add, value


@pytest.mark.parametrize("a, expected", [(1, 1234), (value(), "a-1234"), pytest.param([3], [1234,
    5678], marks=pytest.mark.slow)])
@pytest.mark.parametrize("b", [7, 8])
def test_rows(a, b, expected):
    assert add(a, b) == expected


class TestMore:
    @pytest.mark.parametrize("text", ["1234", "\\u00e4 1234", None])
    def test_text(self, text):
        assert add() == [text]
"""
IDS = ["test_rows[7-1-1234]", "test_rows[8-a1-a-1234]", "test_rows[7-a2-expected2]", "TestMore::test_text[1234]",
       r"TestMore::test_text[\xe4 1234]", "TestMore::test_text[None]"]  # fmt: skip


def test_rows_of_parameters_are_taken_out() -> None:
    """As pytest itself names the tests, which then have ids without what they expect."""
    found = hold(ROWS, [], 0, IDS)
    ast.parse(found.source)
    assert "1234" not in found.source and len(found.source.splitlines()) == len(ROWS.splitlines())
    assert [found.checks[0], found.checks[1]] == [Check(9, "eq", "(expected)"), Check(15, "eq", "([text])")]
    assert [*found.renamed] == IDS and not [each for each in found.renamed.values() if "1234" in each]
    assert found.renamed["test_rows[8-a1-a-1234]"].startswith("test_rows[8-a1-held")
    assert [found.rows[found.renamed[each]] for each in IDS] == [
        {"expected": "(1234)"}, {"expected": '("a-1234")'}, {"expected": "([1234,\n    5678])"}, {"text": '("1234")'},
        {"text": '("\\u00e4 1234")'}, {"text": "(None)"},
    ]  # fmt: skip


def test_ids_of_rows_are_those_of_pytest(tmp_path: Path) -> None:
    """Of tests with and without what they expect."""
    (tmp_path / "calc.py").write_text("def add(*given): return given\n\ndef value(): return object()\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    found = hold(ROWS, [], 0, IDS)
    (tmp_path / "test_a.py").write_text(ROWS)
    (tmp_path / "test_b.py").write_text(found.source)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "."]
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    listed = subprocess.run(command, cwd=tmp_path, env=alone, capture_output=True, text=True).stdout.splitlines()
    assert {*listed} >= {*(f"test_a.py::{each}" for each in IDS)}
    assert {*listed} >= {*(f"test_b.py::{each}" for each in found.renamed.values())}


ROW = (
    "import pytest\n{more}\n@pytest.mark.parametrize('a, want', [{rows}]{options})\ndef test_f(a, want):\n    {body}\n"
)


@pytest.mark.parametrize(
    ("changes", "ids"),
    [
        ({"body": "assert f(a, want) == want"}, ["test_f[1-1234]"]),
        ({"body": "assert f(a) == want\n    print(want)"}, ["test_f[1-1234]"]),
        ({"rows": "(1, 1234), (2, value())"}, ["test_f[1-1234]"]),
        ({"rows": "(1, 1234), (1, 1234)"}, ["test_f[1-12340]"]),
        ({"rows": "(1, 1234), (1, '1234')"}, ["test_f[1-12340]"]),
        ({"options": ", ids=str"}, ["test_f[1-1234]"]),
        ({"options": ", indirect=True"}, ["test_f[1-1234]"]),
        ({"rows": "(1, 1234), *more"}, ["test_f[1-1234]"]),
        ({"more": "@pytest.fixture\ndef more(want): return want\n"}, ["test_f[1-1234]"]),
        ({}, ["test_f[1-1234]", "test_f[own name]"]),
        ({}, ["test_f[1-1234]", "test_f[1"]),
        ({}, []),
    ],
)
def test_rows_that_stay(changes: dict[str, str], ids: list[str]) -> None:
    given = {"more": "", "rows": "(1, 1234), (2, 5)", "options": "", "body": "assert f(a) == want", **changes}
    found = hold(ROW.format(**given), [], 0, ids)
    assert "1234" in found.source and (found.renamed, found.rows) == ({}, {})
    assert [check.predicate for check in found.checks.values()] == ["true"]


@pytest.mark.parametrize("fixture", ["request", "snapshot", "data_regression"])
def test_rows_stay_where_a_fixture_may_read_the_id(fixture: str) -> None:
    text = ROW.format(more="", rows="(1, 1234)", options="", body="assert f(a) == want")
    ids = ["test_f[1-1234]"]
    assert (
        hold(text, [], 0, ids).renamed
        and not hold(text.replace("(a, want)", f"(a, want, {fixture})"), [], 0, ids).renamed
    )


def test_rows_stay_where_other_files_or_classes_have_the_tests() -> None:
    rows = ROW.format(more="", rows="(1, 1234)", options="", body="assert f(a) == want").replace("\n\n", "\n")
    test = "t/test_a.py::test_f[1-1234]"
    assert hold_tests({"t/test_a.py": rows}, [test]).renamed == {test: "t/test_a.py::test_f[1-held0x0]"}
    assert hold_tests({"t/test_a.py": rows, "t/test_b.py": "from test_a import *\n"}, [test]).renamed == {}
    assert hold_tests({"t/test_a.py": rows}, [test, "test_short"]).renamed == {}
    method = rows.replace("def test_f(a", "def test_f(self, a").splitlines()
    inside = "\n".join([method[0], "class TestA:", *(f"    {line}" for line in method[1:])])
    test = "t.py::TestA::test_f[1-1234]"
    assert (
        hold_tests({"t.py": inside}, [test]).renamed
        and not hold_tests({"t.py": f"{inside}\nclass TestB(TestA):\n    pass\n"}, [test]).renamed
    )


def test_files_are_parsed_by_several_threads_at_once() -> None:
    """CPython 3.11.7 counts the depth of trees for all threads together."""
    source = "def test_f():\n" + "    assert f() == [1, 2, (3, 4)]\n" * 400

    def other(phase: str, info: object) -> None:
        time.sleep(0)  # lets another thread run in the middle of a tree

    gc.callbacks.append(other)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert {len(found.checks) for found in threads.map(lambda first: hold(source, [], first), range(12))} == {
                400
            }
    finally:
        gc.callbacks.remove(other)


def test_unreachable_assertions_are_not_required() -> None:
    for source in (
        "if f():\n    assert f() == 3",
        "for each in f():\n    assert f() == 3",
        "while f():\n    assert not f()",
    ):
        assert held(source).needed == {"test_f": []}
    assert held("y = 1\nif f():\n    assert f() == 3").needed == {"test_f": [1]}  # the line before


def test_names_that_a_file_binds_are_not_builtins() -> None:
    text = "def list(x):\n    return 3\ndef test_f():\n    assert f() == list([1])\n"
    assert [check.predicate for check in hold(text, [], 0).checks.values()] == ["true"]


@pytest.mark.parametrize(
    "text", ["def broken(:\n", "import inspect\ndef test_f():\n    assert inspect.getsource(test_f) == 3\n", ""]
)
def test_files_that_stay_as_they_are(text: str) -> None:
    assert hold(text, [], 0) == HeldFile(text)


class Level(IntEnum):
    LOW = 1


Point = namedtuple("Point", "x y")
VALUES: list[Any] = [
    None, True, 5, -(1 << 70), 0.5, float("inf"), "a\ud800", b"\xff", 1j, [1, (2, {3})], {"a": {1: [None]}},
    frozenset({1}), (), OrderedDict(a=1), Counter("aab"), Point(1, 2), Level.LOW, [Level.LOW], Fraction(1, 2),
    Decimal("0.10"),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_data_arrives_as_it_was(value: Any) -> None:
    sent = json.loads(json.dumps(run_tests.encoded(value, [100])))
    arrived = run_tests.decoded(sent)
    assert arrived == value and type(arrived) in (*run_tests.KINDS, type(None), Fraction, Decimal)


class Everything(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("value", [Everything(3), [Everything(3)], object(), range(3), [0] * 101])
def test_other_objects_are_no_plain_data(value: object) -> None:
    with pytest.raises(run_tests._NotPlainError):
        run_tests.encoded(value, [100])


@pytest.mark.parametrize("value", [3, 0.5, "calc", "", [1, 2], (1,), {"a": 1}, {1, 2}, b"ab", True, None, {}, []])
def test_decoys_are_others_of_the_same_kind(value: Any) -> None:
    found = [ast.literal_eval(source) if source != "(set())" else set() for source in run_tests.decoys(value)]
    assert found and all(each != value for each in found)
    assert value in (True, None) or (
        len(found) == run_tests.DECOYS and all(type(each) is type(value) for each in found)
    )


def test_the_runner_needs_no_package_of_ours() -> None:
    """It runs in the repository's interpreter."""
    assert importlib.util.find_spec("toolrl.swe.inside.run_tests")
    tree = ast.parse(Path(run_tests.__file__).read_text())
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in names if name.startswith("verl")]


def judge(
    text: str = "def test_f():\n    assert f() == 3\n", wanted: str = "t.py::test_f", ids: Sequence[str] = ()
) -> run_tests._Run:
    found, other = hold(text, [], 0, ids), hold("def test_g():\n    g()\n", [], 50)
    held = {
        "checks": {str(number): asdict(check) for number, check in (found.checks | other.checks).items()},
        "needed": {"t.py": found.needed, "other.py": other.needed},
        "rows": {f"t.py::{test}": values for test, values in found.rows.items()},
        "guarded": [],
    }
    run = {
        "tests": [wanted, *(f"t.py::{each}" for each in found.renamed.values())],
        "may_fail": [],
        "args": [],
        "timeout_s": 1.0,
    }
    made = run_tests._Run(None, {}, held, run, pytest)  # type: ignore[arg-type]
    made._may_fail = set()
    return made


def outcome(made: run_tests._Run, *messages: list[Any]) -> tuple[dict[str, str], bool]:
    """Outcomes after these messages, and whether one was refused."""
    answers = [made._answer(json.dumps(message).encode()) for message in messages]
    return made._outcomes, None in answers


BEGIN, RIGHT, PASSED = ["begin", "t.py::test_f"], ["check", 0, 3], ["finish", "passed"]
OBJECT = ["check", 0, ["object", ["builtins.object"], True]]


def test_a_test_passes_by_its_values() -> None:
    made = judge()
    assert outcome(made, BEGIN, RIGHT, PASSED) == ({"t.py::test_f": "passed"}, False) and made._held == {"t.py::test_f"}
    assert outcome(judge(), BEGIN, RIGHT, ["finish", "error"])[0] == {"t.py::test_f": "error"}


@pytest.mark.parametrize(
    "messages",
    [
        [BEGIN, PASSED],
        [BEGIN, ["check", 0, 4], PASSED],
        [BEGIN, ["check", 0, 4], RIGHT, PASSED],
        [BEGIN, ["check", 0, 4], BEGIN, RIGHT, PASSED],
        [BEGIN, ["check", 0, 4], PASSED, BEGIN, RIGHT, PASSED],
        [BEGIN, RIGHT, PASSED, BEGIN, ["check", 0, 4], PASSED],
        [BEGIN, OBJECT, PASSED],
        [BEGIN, RIGHT, OBJECT, PASSED],  # it has seen candidates, which other tests may expect
        [BEGIN, OBJECT, ["opened", [False] * 8], PASSED],
        [BEGIN, ["check", 0, ["bytes", "3"]], PASSED],
    ],
)
def test_no_value_is_tried_twice(messages: list[list[Any]]) -> None:
    assert outcome(judge(), *messages)[0]["t.py::test_f"] != "passed"


@pytest.mark.parametrize(
    "messages",
    [
        [RIGHT],
        [PASSED],
        [BEGIN, OBJECT, RIGHT],  # after it has seen the candidates
        [BEGIN, ["opened", [True]]],
        [BEGIN, ["check", 99, 3]],
        [BEGIN, ["check", 0, ["eval", "3"]]],
        [BEGIN, ["check", 0]],
        [["_decided", "0", True, 3]],
        [["begin", "t.py::test_g"]],
        [["begin", "t.py::test_f more"]],
        [["begin", "none.py::test_f"]],
        [["begin", 3]],
        [{}],
        ["["],
    ],
)
def test_messages_that_no_test_sends_are_refused(messages: list[Any]) -> None:
    made = judge()
    assert outcome(made, *messages)[1] and made._tampered


@pytest.mark.parametrize("test", ["other.py::test_f", "none.py::test_f", "t.py::test_f more", "t.py::test_f.x"])
def test_a_short_name_does_not_stand_for_a_test_without_checks(test: str) -> None:
    """R2E-Gym's names have no file."""
    assert outcome(judge(wanted="test_f"), ["begin", test], PASSED) == ({}, True)
    assert outcome(judge(wanted="test_f"), BEGIN, RIGHT, PASSED) == ({"test_f": "passed"}, False)


def test_an_object_equal_to_the_expected_value_only_is_right() -> None:
    made = judge()
    assert made._answer(json.dumps(BEGIN).encode()) == b""
    answer = made._answer(json.dumps(OBJECT).encode())
    assert answer is not None and answer[:1] == run_tests.OPEN
    predicate, negated, sources = json.loads(answer[5:])
    assert (predicate, negated, sources.count("(3)"), len(sources)) == ("eq", False, 1, run_tests.DECOYS + 1)
    assert outcome(made, ["opened", [source == "(3)" for source in sources]], PASSED) == (
        {"t.py::test_f": "passed"},
        False,
    )
    assert (made._opened, made._held) == ({0}, set())


@pytest.mark.parametrize(
    ("names", "passes"),
    [
        (["KeyError", "LookupError", "Exception"], True),
        (["KeyError", "AttributeError", "LookupError", "Exception", "NoKind", "int"], True),
        (["KeyError", "AttributeError", "TypeError", "Exception"], False),
    ],
)
def test_no_exception_is_of_every_kind(names: list[str], passes: bool) -> None:
    made = judge("import pytest\ndef test_f():\n    with pytest.raises(KeyError):\n        f()\n")
    raised = ["check", 0, [[f"builtins.{name}" for name in names], "text"]]
    assert outcome(made, BEGIN, raised, PASSED)[0] == {"t.py::test_f": "passed"}
    assert bool(made._tampered) is not passes


def test_each_row_expects_its_own_value() -> None:
    text = ROW.format(more="", rows="(1, 3), (2, [4])", options="", body="assert f(a) == want")
    ids = ["test_f[1-3]", "test_f[2-want1]"]
    first, second = (f"t.py::{each}" for each in hold(text, [], 0, ids).renamed.values())
    right = [["begin", first], ["check", 0, 3], PASSED, ["begin", second], ["check", 0, ["list", [4]]], PASSED]
    made = judge(text, ids=ids)
    assert outcome(made, *right) == ({first: "passed", second: "passed"}, False) and made._held == {first, second}
    exchanged = [["begin", second], ["check", 0, 3], PASSED, ["begin", first], ["check", 0, ["list", [4]]], PASSED]
    assert outcome(judge(text, ids=ids), *exchanged)[0] == {first: "failed", second: "failed"}
    made = judge(text, ids=ids)
    assert outcome(made, *right[:3], ["begin", "t.py::test_f[2-want1]"])[1]  # the name that it had
    assert made._outcomes == {first: "passed"}


@pytest.mark.parametrize("expected", ['"calc"', "0x10", "[1,2]", "pytest.approx(0.5)", "dict(a=1)"])
def test_candidates_are_written_in_one_style(expected: str) -> None:
    """What a test expects is none that stands out."""
    made = judge(f"import pytest\ndef test_f():\n    assert f() == {expected}\n")
    made._answer(json.dumps(BEGIN).encode())
    answer = made._answer(json.dumps(OBJECT).encode())
    assert answer is not None and answer[:1] == run_tests.OPEN
    _, _, sources = json.loads(answer[5:])
    names = {"approx": pytest.approx}
    values = [eval(source, names) for source in sources]
    assert sum(value == eval(expected, {"pytest": pytest}) for value in values if "approx" not in expected) in (0, 1)
    assert len({source.partition("(approx")[1] for source in sources}) == 1
    assert all(
        source == f"({value!r})" for source, value in zip(sources, values, strict=True) if "approx" not in source
    )
