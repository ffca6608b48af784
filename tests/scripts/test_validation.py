"""Validation of tasks: what is wrong with one, which tests are flaky, and that it goes on after a stop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.data import validation
from scripts.data.validation import Journal, Validation, validate, validate_all, validate_row
from tests.toolrl.sandbox.sandbox_host import need_bubblewrap
from tests.toolrl.swe.repositories import calc_task, pytest_environment
from toolrl.swe.local import LocalRuntimes
from toolrl.swe.runtime import RuntimeLostError, TaskFaultError
from toolrl.swe.scoring import PatchOutcome, PatchVerdict
from toolrl.swe.tasks import SweTask

ROW = {
    "instance_id": "calc",
    "repository": "calc",
    "problem_statement": "add subtracts",
    "FAIL_TO_PASS": ["t.py::a", "t.py::b"],
    "PASS_TO_PASS": ["t.py::c"],
    "patch": "the fix",
}


def verdict(passed: str, outcome: PatchOutcome | None = None) -> PatchVerdict:
    """passed: letters of tests"""
    regular = PatchOutcome.RESOLVED if passed == "abc" else PatchOutcome.UNRESOLVED
    return PatchVerdict(outcome or regular, detail="log", passed=frozenset(f"t.py::{each}" for each in passed))


def validated(
    monkeypatch: pytest.MonkeyPatch, *verdicts: PatchVerdict, idle: str = ""
) -> tuple[dict[str, Any], Validation]:
    """Of a row whose fix, then whose bug is scored so, each twice; the same again if it is validated again.

    idle: the patch of a session without changes
    """
    coming: Iterator[PatchVerdict] = iter(verdicts)

    async def score(_: object, task: SweTask, patch: str, _compiled: object = None) -> PatchVerdict:
        if patch == idle:
            return verdict("", PatchOutcome.UNRESOLVED if idle else PatchOutcome.EMPTY_PATCH)
        found = next(coming)
        left = found.passed & {*task.fail_to_pass, *task.pass_to_pass}
        resolved = left == {*task.fail_to_pass, *task.pass_to_pass}
        if found.outcome in validation.REPORTED:
            return PatchVerdict(PatchOutcome.RESOLVED if resolved else PatchOutcome.UNRESOLVED, passed=left)
        return found

    async def of_idle_session(*_: object) -> str:
        return idle

    monkeypatch.setattr(validation, "score_patch", score)
    monkeypatch.setattr(validation, "patch_of_idle_session", of_idle_session)
    done = asyncio.run(validate_row(None, ROW))  # type: ignore[arg-type]
    assert next(coming, None) is None
    return done


def test_a_task_whose_fix_heals_what_the_bug_breaks_has_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed, broken = [verdict("abc")] * 2, [verdict("c")] * 2
    assert validated(monkeypatch, *fixed, *broken) == (ROW, Validation())
    endless = [verdict("", PatchOutcome.TIMEOUT)] * 2
    assert validated(monkeypatch, *fixed, *endless) == (ROW, Validation())


@pytest.mark.parametrize(
    ("fixed", "broken", "problem"),
    [
        ("ab", "c", "the fix scores unresolved"),
        ("abc", "abc", "the bug scores resolved"),
        ("abc", "bc", "with the bug t.py::b of FAIL_TO_PASS passes"),
        ("abc", "", "with the bug t.py::c of PASS_TO_PASS fails"),
    ],
)
def test_problems_of_a_task_are_named(monkeypatch: pytest.MonkeyPatch, fixed: str, broken: str, problem: str) -> None:
    _, found = validated(monkeypatch, *[verdict(fixed)] * 2, *[verdict(broken)] * 2)
    assert found.flaky == () and [each.partition(":")[0] for each in found.problems] == [problem.partition(":")[0]]
    assert found.problems[0].startswith(problem)


def test_a_task_that_cannot_be_judged_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    async def score(*_: object) -> PatchVerdict:
        raise error

    monkeypatch.setattr(validation, "score_patch", score)
    error: RuntimeLostError = TaskFaultError("calc counts as tampered without any patch, too")
    kept, found = asyncio.run(validate_row(None, ROW))  # type: ignore[arg-type]
    assert kept == ROW and found.problems == ("calc counts as tampered without any patch, too",)
    error = RuntimeLostError("the disk is full")  # of the machine: the command ends, and the row is tried again
    with pytest.raises(RuntimeLostError, match="the disk is full"):
        asyncio.run(validate_row(None, ROW))  # type: ignore[arg-type]


def test_a_fault_that_appears_without_the_flaky_tests_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    async def score(_: object, task: SweTask, patch: str, _compiled: object = None) -> PatchVerdict:
        if len(task.fail_to_pass) == 1:
            raise TaskFaultError("calc counts as tampered without any patch, too")
        return next(coming)

    coming = iter([verdict("abc"), verdict("ac"), verdict("c"), verdict("c"), verdict("", PatchOutcome.EMPTY_PATCH)])

    async def of_idle_session(*_: object) -> str:
        return ""

    monkeypatch.setattr(validation, "score_patch", score)
    monkeypatch.setattr(validation, "patch_of_idle_session", of_idle_session)
    row, found = asyncio.run(validate_row(None, ROW))  # type: ignore[arg-type]
    assert row == {**ROW, "FAIL_TO_PASS": ["t.py::a"]} and found.flaky == ("t.py::b",)
    assert found.problems == ("calc counts as tampered without any patch, too",)


def test_a_session_without_changes_must_leave_no_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    _, found = validated(monkeypatch, *[verdict("abc")] * 2, *[verdict("c")] * 2, idle="of the setup")
    assert found.problems == ("a session without changes scores unresolved: its setup still writes files",)


@pytest.mark.long
@pytest.mark.parametrize(
    ("setup", "valid"),
    [("", True), ("echo made > made.txt", True), ("(while sleep 0.01; do date >> times.txt; done) &", False)],
)
async def test_a_setup_that_still_writes_is_found(tmp_path: Path, setup: str, valid: bool) -> None:
    need_bubblewrap()
    runtimes = LocalRuntimes(tmp_path / "runtimes")
    try:
        found = await validate(runtimes, calc_task(tmp_path, pytest_environment(tmp_path), setup=setup))
    finally:
        await runtimes.close()
    assert found.flaky == () and (found.problems == ()) is valid
    assert valid or found.problems[0].startswith("a session without changes scores")


def test_a_tampered_or_broken_run_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed, tampered = verdict("abc"), verdict("", PatchOutcome.TAMPERED)
    _, found = validated(monkeypatch, fixed, fixed, tampered, tampered)
    assert found.problems == ("the bug scores tampered: log",)


def test_flaky_tests_are_dropped_and_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    again = [verdict("abc"), verdict("abc"), verdict("c"), verdict("c")]
    row, found = validated(monkeypatch, verdict("abc"), verdict("ac"), verdict("c"), verdict("c"), *again)
    assert found == Validation((), ("t.py::b",)) and row == {**ROW, "FAIL_TO_PASS": ["t.py::a"]}
    row, found = validated(monkeypatch, verdict("abc"), verdict("abc"), verdict("c"), verdict(""), *again)
    assert found == Validation((), ("t.py::c",)) and row == {**ROW, "PASS_TO_PASS": []}
    _, found = validated(monkeypatch, verdict("abc"), verdict("c"), verdict("c"), verdict("c"))
    assert found.problems == ("all tests that the fix heals are flaky",)
    others = [verdict("abc"), verdict("abc"), verdict("c"), verdict("ac")]
    _, found = validated(monkeypatch, verdict("abc"), verdict("ac"), verdict("c"), verdict("c"), *others)
    assert found.problems[-1] == "other tests are flaky, too: t.py::a"


def test_a_validated_step_is_not_validated_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    async def check(_: object, row: dict[str, Any]) -> tuple[dict[str, Any], Validation]:
        seen.append(row["instance_id"])
        return row, Validation(("bad",)) if row["instance_id"] == "b" else Validation()

    class NoRuntimes:
        async def close(self) -> None:
            """Nothing was started."""

    monkeypatch.setattr(validation, "validate_row", check)
    monkeypatch.setattr(validation, "LocalRuntimes", NoRuntimes)
    rows = [{"instance_id": name} for name in "abc"]

    def run() -> list[tuple[dict[str, Any], Validation]]:
        return asyncio.run(validate_all(rows, 2, Journal(tmp_path / "journal")))

    first = run()
    assert [found.problems for _, found in first] == [(), ("bad",), ()] and seen == ["a", "b", "c"]
    lines = (tmp_path / "journal").read_text().splitlines()
    (tmp_path / "journal").write_text("\n".join(lines[:2]) + '\n{"key": "writ')
    assert run() == first and seen == ["a", "b", "c", "c"]
