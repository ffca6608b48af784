"""Damaged data files are refused before anything heavy is imported."""

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
from verl.data.rows import check_pages, read_rows
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
def test_broken_file_ends_are_reported(name: str, cut, problem: str, whole: bytes, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / name
    path.write_bytes(cut(whole))
    with pytest.raises(DataError, match=problem):
        check_ends(str(path))


def test_damaged_pages_are_reported(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "whole.parquet"
    check_pages(str(path))
    path.write_bytes(whole[:8] + bytes(8) + whole[16:])  # the first page's header
    with pytest.raises(DataError, match=r"whole\.parquet: cannot be read as parquet"):
        check_pages(str(path))
    pq.write_table(pa.table({"n": range(100)}), path, compression="none", write_page_checksum=True)
    content = path.read_bytes()
    place = content.index((50).to_bytes(8, "little"))
    path.write_bytes(content[:place] + b"\x33" + content[place + 1 :])
    for reads in (check_pages, lambda source: list(read_rows(source))):
        with pytest.raises(DataError, match="CRC"):
            reads(str(path))


def test_no_flipped_bit_of_a_parquet_footer_is_another_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"n": [1]}), path)
    content, refused = path.read_bytes(), 0
    length = int.from_bytes(content[-8:-4], "little")
    for place in range(len(content) - 8 - length, len(content) - 8):
        path.write_bytes(content[:place] + bytes([content[place] ^ 2]) + content[place + 1 :])
        try:
            list(read_rows(str(path)))
        except DataError:
            refused += 1
    assert refused > length / 3


@pytest.mark.parametrize("content", [b"", b"PAR1" + bytes(60) + b"\x34\0\0\0PAR1"])  # 52 bytes of metadata, all zeros
def test_training_reports_damaged_files_before_its_imports(content: bytes, tmp_path: Path) -> None:
    data = tmp_path / "rows.parquet"
    data.write_bytes(content)
    overrides = [f"model.path={MINI / 'model'}", f"data.train_files=[{data}]"]
    code = (
        "import sys; from verl.trainer import main_ppo; "
        f"assert main_ppo.main({overrides!r}) == 2; assert not {{'torch', 'transformers'}} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0 and f"DataError: {data}: " in done.stdout, done.stdout + done.stderr
