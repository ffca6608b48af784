"""The lab on a task of a repository: the fix and the cheats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.toolrl.envs.swe.test_swe_env import row_of
from tests.toolrl.sandbox.sandbox_host import need_bubblewrap
from tests.toolrl.swe.repositories import GOLD, pytest_environment
from toolrl.check.lab.__main__ import main
from toolrl.check.lab.swe import try_tasks
from toolrl.swe.cheats import CHEATS
from toolrl.swe.tasks import as_task_row
from verl.data.tasks import to_task
from verl.host.daemon import run_async

pytestmark = pytest.mark.long  # each starts runtimes
FEW = ("frames while importing", "a text equals everything", "the runner exits 0")


def test_a_sound_task_and_one_whose_fix_fixes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_bubblewrap()
    monkeypatch.chdir(tmp_path)  # in which environments of rows may lie
    row = row_of(tmp_path, pytest_environment(tmp_path))
    unfixed = {**row, "instance_id": "unfixed", "patch": GOLD.replace("+    return a + b", "+    return b - a")}
    tasks = [to_task(as_task_row(each), each["instance_id"]) for each in (row, unfixed)]
    report = run_async(try_tasks({}, tasks[:1], FEW))
    assert report.is_sound and report.scores == {name: [0.0] for name in FEW} and report.held == [1.0]
    assert report.table().row_count == len(FEW)
    report = run_async(try_tasks({}, tasks[1:], FEW[:1]))
    assert not report.is_sound and report.unfixed[0].startswith("unfixed: the fix scores unresolved")


@pytest.mark.slow
def test_the_command_prints_a_line_for_each_cheat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    need_bubblewrap()
    rows = tmp_path / "tasks.jsonl"
    rows.write_text(json.dumps(row_of(tmp_path, pytest_environment(tmp_path))) + "\n")
    assert main(["env.name=swe", f"data={rows}", "data.map=toolrl.swe.tasks:as_task_row"]) == 0
    printed = capsys.readouterr().out
    assert not [name for name in CHEATS if name[:20] not in printed]
    assert "1 tasks tried; 100% of their tests compare a value that the patch cannot read" in printed
