"""The generated one-line bugs: noticed by their tests, and healed by their fix."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from scripts.swe import make_mini
from scripts.swe.make_mini import FAMILIES, demonstration, draw_bug, make_bugs, task_row
from toolrl.swe.tasks import read_swe_task
from verl.formats.toolrl import ToolRlFormat


def test_every_bug_of_every_family_is_noticed_and_its_line_is_the_only_difference(tmp_path: Path) -> None:
    draw = Random(0)
    for name, family in FAMILIES.items():
        drawn = [bug for bug in (draw_bug(name, draw) for _ in range(80)) if bug]
        assert {bug.line for bug in drawn} == {line for line, _ in family.bugs}, name
        for bug in drawn:
            lines = bug.code.splitlines()
            assert [number for number, line in enumerate(lines, 1) if line != bug.correct[number - 1]] == [bug.line]
            assert not any(letter in bug.code for letter in "FVRXK"), bug.code
            task = read_swe_task(task_row(bug, tmp_path / "repository", "environment"))
            text = task.hidden_tests["test_program.py"].replace("from program import", "# ")
            for code, passes in (("\n".join(bug.correct), True), (bug.code, False)):
                assert _passes(code, text) is passes, (code, text)
            assert task.file == "program.py" and bug.wrong in task.statement


def _passes(code: str, test: str) -> bool:
    names: dict[str, object] = {}
    exec(f"{code}\n{test}", names)
    try:
        names["test_calls"]()  # type: ignore[operator]
    except Exception:  # noqa: BLE001  a bug may raise anything
        return False
    return True


def test_files_follow_the_seed_and_share_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_mini, "COUNTS", {"test": 24, "train": 48, "demonstrations": 60})
    first, again, other = make_bugs(3), make_bugs(3), make_bugs(4)
    assert first == again and first != other
    assert {name: len(bugs) for name, bugs in first.items()} == make_mini.COUNTS
    test = {bug.statement for bug in first["test"]}
    assert len(test) == 24 and not test & {bug.statement for name in ("train", "demonstrations") for bug in first[name]}
    assert {bug.family for bug in first["test"]} == set(FAMILIES)


def test_demonstrations_are_of_mixed_quality() -> None:
    draw = Random(0)
    bug = next(bug for bug in (draw_bug("sum", draw) for _ in range(9)) if bug)
    rows = [demonstration(bug, draw) for _ in range(400)]
    calls = [json.loads(row["messages"][-1]["content"].split("\n")[1])["parameters"] for row in rows]
    right = {"line": bug.line, "text": bug.correct[bug.line - 1]}
    unchanged = {"line": bug.line, "text": bug.wrong}
    assert 0.28 < sum(call == right for call in calls) / 400 < 0.42
    assert 0.48 < sum(call == unchanged for call in calls) / 400 < 0.62
    assert len({call["line"] for call in calls}) > 2
    parsed = ToolRlFormat().parse(rows[0]["messages"][-1]["content"])
    assert [call.name for call in parsed.calls] == ["edit_line"]  # type: ignore[union-attr]
