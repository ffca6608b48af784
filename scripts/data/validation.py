"""Checks tasks before anybody trains on them: what the fix scores, and what the bug does."""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolrl.swe.local import LocalRuntimes
from toolrl.swe.runtime import Runtimes, TaskFaultError
from toolrl.swe.scoring import PatchOutcome, PatchVerdict, collect_patch, score_patch
from toolrl.swe.tasks import SweTask, read_swe_task

RUNS = 2  # of each: a flaky test shows a difference
IDLE_S = 1.0  # how long a session does nothing: what the task's setup still runs has to be seen writing
REPORTED = (PatchOutcome.RESOLVED, PatchOutcome.UNRESOLVED)  # with an outcome for each test
TESTS = ("FAIL_TO_PASS", "PASS_TO_PASS")


@dataclass(frozen=True, slots=True)
class Validation:
    """problems: why a task cannot be used. flaky: tests with another outcome in the second run of the same patch"""

    problems: tuple[str, ...] = ()
    flaky: tuple[str, ...] = ()


class Journal:
    """A file with a line for everything that is done, so that a command goes on where it was stopped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        text = path.read_text() if path.exists() else ""
        self._before = "" if text.endswith("\n") else "\n" * bool(text)
        self.found: dict[str, dict[str, Any]] = {}
        for line in text.splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue  # the line that was being written when the command was stopped
            self.found[record["key"]] = record

    def add(self, record: dict[str, Any]) -> dict[str, Any]:
        """Append a record, which has a `key`."""
        self.found[record["key"]] = record
        with self._path.open("a") as file:
            file.write(f"{self._before}{json.dumps(record)}\n")
        self._before = ""
        return record


async def validate(runtimes: Runtimes, task: SweTask, compiled: Path | None = None) -> Validation:
    """The gold patch must score 1, a session without changes 0, and the bug 0 with exactly FAIL_TO_PASS failing.

    compiled: see score_patch
    """
    harmless = diff({}, {"NOTES.md": "no change\n"})
    fixed = [await score_patch(runtimes, task, task.gold_patch, compiled) for _ in range(RUNS)]
    broken = [await score_patch(runtimes, task, harmless, compiled) for _ in range(RUNS)]
    flaky = _flaky(fixed) | _flaky(broken)
    problems = [_unfixed(each, flaky) for each in fixed] + [_harmless(each, task, flaky) for each in broken]
    idle = await score_patch(runtimes, task, await patch_of_idle_session(runtimes, task))
    if idle.outcome is not PatchOutcome.EMPTY_PATCH:
        problems.append(f"a session without changes scores {idle.outcome}: its setup still writes files")
    return Validation(tuple(dict.fromkeys(filter(None, problems))), tuple(sorted(flaky)))


async def patch_of_idle_session(runtimes: Runtimes, task: SweTask) -> str:
    """What a session leaves that does nothing: not empty if processes of the task's setup still write."""
    runtime = await runtimes.start(task)
    try:
        await asyncio.sleep(IDLE_S)
        return await collect_patch(runtime, task)
    finally:
        await runtime.close()


async def validate_row(
    runtimes: Runtimes, row: Mapping[str, Any], compiled: Path | None = None
) -> tuple[dict[str, Any], Validation]:
    """The row without its flaky tests, and what is wrong with it. Raises DataError, RuntimeLostError."""
    found = await _validate_or_fault(runtimes, read_swe_task(row), compiled)
    if not found.flaky:
        return dict(row), found
    kept = {**row, **{name: [test for test in row[name] if test not in found.flaky] for name in TESTS}}
    if not kept["FAIL_TO_PASS"]:
        return kept, Validation(("all tests that the fix heals are flaky",), found.flaky)
    again = await _validate_or_fault(runtimes, read_swe_task(kept), compiled)
    still = (f"other tests are flaky, too: {', '.join(again.flaky)}",) if again.flaky else ()
    return kept, Validation(again.problems + still, found.flaky)


async def _validate_or_fault(runtimes: Runtimes, task: SweTask, compiled: Path | None) -> Validation:
    """A fault of the task is one of its problems."""
    try:
        return await validate(runtimes, task, compiled)
    except TaskFaultError as error:
        return Validation((error.problem,))


async def validate_all(
    rows: Sequence[Mapping[str, Any]], concurrent: int, journal: Journal
) -> list[tuple[dict[str, Any], Validation]]:
    """Every row as `validate_row` leaves it. Rows that the journal has are not validated again."""
    runtimes = LocalRuntimes()
    slots = asyncio.Semaphore(concurrent)

    async def one(row: Mapping[str, Any]) -> tuple[dict[str, Any], Validation]:
        key = hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:16]
        async with slots:
            if key not in journal.found:
                kept, found = await validate_row(runtimes, row)
                journal.add({"key": key, "row": kept, "problems": found.problems, "flaky": found.flaky})
        record = journal.found[key]
        return record["row"], Validation(tuple(record["problems"]), tuple(record["flaky"]))

    try:
        return await asyncio.gather(*map(one, rows))
    finally:
        await runtimes.close()


def _flaky(verdicts: Sequence[PatchVerdict]) -> frozenset[str]:
    passed = [verdict.passed for verdict in verdicts if verdict.outcome in REPORTED]
    return frozenset().union(*passed) - frozenset.intersection(*passed) if passed else frozenset()


def _unfixed(verdict: PatchVerdict, flaky: frozenset[str]) -> str:
    if verdict.outcome is PatchOutcome.RESOLVED or (verdict.outcome is PatchOutcome.UNRESOLVED and flaky):
        return ""  # a task with flaky tests is validated again without them
    return f"the fix scores {verdict.outcome}: {verdict.detail[-300:]}"


def _harmless(verdict: PatchVerdict, task: SweTask, flaky: frozenset[str]) -> str:
    if verdict.outcome is PatchOutcome.TIMEOUT:
        return ""
    if verdict.outcome is not PatchOutcome.UNRESOLVED:
        return f"the bug scores {verdict.outcome}: {verdict.detail[-300:]}"
    if passing := verdict.passed.intersection(task.fail_to_pass) - flaky:
        return f"with the bug {', '.join(sorted(passing)[:3])} of FAIL_TO_PASS passes"
    if failing := frozenset(task.pass_to_pass) - verdict.passed - flaky:
        return f"with the bug {', '.join(sorted(failing)[:3])} of PASS_TO_PASS fails"
    return ""


def diff(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """A patch as git writes it."""
    with tempfile.TemporaryDirectory() as folder:
        for side, files in (("a", before), ("b", after)):
            Path(folder, side).mkdir()
            write_files(Path(folder, side), files)
        command = ["git", "diff", "--no-index", "--no-color", "--no-prefix", "a", "b"]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """files: path in the folder -> text"""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
