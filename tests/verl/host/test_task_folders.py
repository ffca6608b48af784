"""Folders of Harbor's tasks as data files: each folder is a row."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl.config.schema import DataConfig
from verl.data.rows import read_rows
from verl.data.tasks import TaskSet
from verl.errors import DataError
from verl.host.task_folders import find_task_folders


def make_task(folder: Path, instruction: str | None) -> Path:
    folder.mkdir(parents=True)
    (folder / "task.toml").write_text("")
    if instruction is not None:
        (folder / "instruction.md").write_text(instruction)
    return folder


def test_each_task_of_a_folder_is_a_row_in_the_order_of_names(tmp_path: Path) -> None:
    second = make_task(tmp_path / "b", "# canary GUID 1\n\nSecond.\n")
    first = make_task(tmp_path / "a", "First.\n")
    (tmp_path / "README.md").write_text("no task")
    (tmp_path / "shared").mkdir()
    tasks = TaskSet(str(tmp_path))
    assert [task.prompt[-1].content for task in tasks] == ["First.", "Second."]
    assert [task.extra for task in tasks] == [{"harbor": str(first)}, {"harbor": str(second)}]
    mapped = TaskSet(str(tmp_path), data=DataConfig(map="toolrl.swe.tasks:as_task_row"))
    assert list(mapped) == list(tasks)


def test_a_task_folder_is_a_file_of_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_task(tmp_path / "a", "First.")
    make_task(folder / "environment", "of the task's own files")
    assert find_task_folders(folder) == [folder]
    monkeypatch.chdir(tmp_path)
    (row,) = read_rows("a")
    assert row["extra_info"] == {"harbor": str(folder)}


def test_a_task_without_an_instruction_is_named(tmp_path: Path) -> None:
    make_task(tmp_path / "a", "First.")
    make_task(tmp_path / "b", None)
    with pytest.raises(DataError, match=r"row 1, .*b cannot be read.*Terminal-Bench 1"):
        TaskSet(str(tmp_path))
    assert len(TaskSet(str(tmp_path), max_bad_share=0.5)) == 1
