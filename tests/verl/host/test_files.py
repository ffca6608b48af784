"""Temporary files of killed processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from verl.errors import DataError
from verl.host.files import remove_unfinished, replacing, temporary_name

KILLED = """
import os, sys
from pathlib import Path
from verl.host.files import replacing, temporary_name
folder = temporary_name(Path(sys.argv[1]) / "model")
with replacing(Path(sys.argv[1]) / "page.html") as file:
    folder.mkdir()
    (folder / "weights").write_text("half")
    file.write_text("half")
    os.kill(os.getpid(), 9)
"""


def test_only_unfinished_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "transcripts"
    with replacing(folder / "step-000001.jsonl") as unfinished:
        unfinished.write_text("whole")
        name = unfinished.name.rpartition("-")[0] + "-1"
    for place in (folder, tmp_path):
        (place / name).write_text("half of")
    (tmp_path / ".lock").touch()
    (tmp_path / "my.unfinished-notes").touch()
    remove_unfinished(tmp_path)
    names = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert names == {".lock", "my.unfinished-notes", "transcripts/step-000001.jsonl"}


def test_the_next_writer_of_a_name_removes_what_killed_ones_have_left_and_nothing_else(tmp_path: Path) -> None:
    for _ in range(2):
        command = [sys.executable, "-c", KILLED, str(tmp_path)]
        assert subprocess.run(command, cwd=ROOT, check=False).returncode == -9
    left = list(tmp_path.iterdir())
    assert len(left) == 2, "the second one has removed what the first one left"
    (gone,) = {path.name.rpartition("-")[2] for path in left}
    mine = temporary_name(tmp_path / "other").name.removesuffix(str(os.getpid()))
    kept = {
        mine + "1",  # a process that lives
        mine + "x",
        mine + "9" * 40,
        f".other.unfinished-elsewhere-{gone}",  # another machine's
        f".other.html.unfinished-{gone}",
        "other",
    }
    for name in kept:
        (tmp_path / name).touch()
    (tmp_path / f"{mine}{gone}").mkdir()
    (tmp_path / f"{mine}{gone}" / "file").touch()
    temporary_name(tmp_path / "model")
    with replacing(tmp_path / "page.html") as page, replacing(tmp_path / "other") as other:
        page.touch()
        other.touch()
    assert {path.name for path in tmp_path.iterdir()} == {*kept, "page.html"}


def test_a_folder_that_cannot_be_made_is_an_error_of_the_path(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be written"), replacing(tmp_path / "file" / "inner" / "out"):
        raise AssertionError("not reached")
