"""Data files that no middle can save are refused before anything heavy is imported."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.conftest import ROOT
from tests.support.tiny import MINI
from verl.data.first_bytes import check_ends
from verl.errors import DataError


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    pq.write_table(pa.table({"prompt": ["a"] * 100}), tmp_path / "whole.parquet")
    return (tmp_path / "whole.parquet").read_bytes()


def test_whole_files_pass(whole: bytes, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(b"{}\n"))
    (tmp_path / "rows.csv").write_text("a\n")
    for path in (tmp_path / "whole.parquet", tmp_path / "rows.jsonl.gz", tmp_path / "rows.csv", MINI / "test.parquet"):
        check_ends(str(path))


@pytest.mark.parametrize(
    ("name", "cut", "problem"),
    [
        ("rows.parquet", lambda whole: b"", "is empty: it has 0 bytes"),
        ("rows.csv", lambda whole: b"", "is empty: it has 0 bytes"),
        ("rows.parquet", lambda whole: whole[:-20], "it was cut off"),
        ("rows.parquet", lambda whole: whole[:4] + whole[-8:], "it was cut off"),  # the metadata are missing
        ("rows.parquet", lambda whole: b"PAR1", "it was cut off"),
        ("rows.parquet", lambda whole: b'{"prompt": "a"}\n', "of another format"),
        ("rows.jsonl.gz", lambda whole: b'{"prompt": "a"}\n', "cannot be read as gzip"),
    ],
)  # fmt: skip
def test_broken_ends_are_told(name: str, cut, problem: str, whole: bytes, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / name
    path.write_bytes(cut(whole))
    with pytest.raises(DataError, match=problem):
        check_ends(str(path))


def test_a_training_tells_them_before_its_imports(tmp_path: Path) -> None:
    data = tmp_path / "rows.parquet"
    data.touch()
    words = [f"model.path={MINI / 'model'}", f"data.train_files=[{data}]"]
    code = (
        "import sys; from verl.trainer import main_ppo; "
        f"assert main_ppo.main({words!r}) == 2; assert not {{'torch', 'transformers', 'pyarrow'}} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0 and "rows.parquet: is empty" in done.stdout, done.stdout + done.stderr
