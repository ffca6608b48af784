"""The record of the code of a run."""

import platform
from pathlib import Path

import verl
from verl.host.code_version import code_version


def test_the_digest_changes_with_any_source_file_and_with_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.py").write_text("x = 1\n")
    first = code_version([tmp_path])
    (tmp_path / "notes.txt").write_text("text")
    assert code_version([tmp_path]) == first
    assert (first["toolrl"], first["python"]) == (verl.__version__, platform.python_version()) and "torch" in first
    (tmp_path / "a" / "one.py").rename(tmp_path / "a" / "two.py")
    renamed = code_version([tmp_path])
    (tmp_path / "a" / "two.py").write_text("x = 2\n")
    assert len({each["source"] for each in (first, renamed, code_version([tmp_path]), code_version())}) == 4
