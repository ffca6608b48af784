"""Damaged data files of a training: each is one error that names the file, long before anything is started."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.chaos.checks import check_refused, outputs
from tests.chaos.harness import Lab, Result
from tests.support.tiny import MINI

MOST_S = 3.0  # of computing, which other programs do not lengthen
_ROWS, _GROUP = 400, 100


def _group(path: Path, number: int) -> int:
    """Where a row group begins."""
    first = pq.read_metadata(path).row_group(number).column(0)
    return int(first.dictionary_page_offset or first.data_page_offset)


def _computed() -> float:
    """Seconds of all processes of ours that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _flipped(whole: bytes, path: Path) -> bytes:
    place = len(whole) // 3
    return whole[:place] + bytes(each ^ 0xFF for each in whole[place : place + 40]) + whole[place + 40 :]


DAMAGES: Mapping[str, Callable[[bytes, Path], bytes]] = {
    "nothing left": lambda whole, path: b"",
    "footer cut": lambda whole, path: whole[:-20],
    "footer cut, mark kept": lambda whole, path: whole[:-200] + whole[-8:],
    "another mark": lambda whole, path: b"XXXX" + whole[4:],
    "zeros alone": lambda whole, path: bytes(len(whole)),
    "pages flipped": _flipped,
    "row group missing": lambda whole, path: whole[: _group(path, 1)] + whole[_group(path, 2) :],
    "row group of zeros": lambda whole, path: (
        whole[: _group(path, 1)] + bytes(_group(path, 2) - _group(path, 1)) + whole[_group(path, 2) :]
    ),
}


def parquet_damaged(lab: Lab, result: Result) -> None:
    """Every damage, to a file of training rows and to one of validation rows."""
    with outputs() as (where, out):
        good, bad = where.tmp.with_suffix(".talk") / "good.parquet", where.tmp.with_suffix(".talk") / "bad.parquet"
        good.parent.mkdir()
        rows = pq.read_table(MINI / "train.parquet").slice(0, _ROWS)
        pq.write_table(rows, good, row_group_size=_GROUP)
        whole, slowest = good.read_bytes(), 0.0
        for damage, damaged in DAMAGES.items():
            bad.write_bytes(damaged(whole, good))
            for setting in (f"data.train_files=[{bad}]", f"data.val_files=[{bad}]"):
                before = _computed()
                ended = lab.start(where, [*lab.overrides("hf", out), setting]).ended()
                slowest = max(slowest, took := _computed() - before)
                check_refused(result, ended, (2,), f"DataError: {bad}: ")
                result.need(len(ended.printed) == 1, f"{damage}, {setting[:9]}: {len(ended.printed)} lines")
                result.need(took < MOST_S, f"{damage}, {setting[:9]}: reported after {took:.1f} s")
        column = rows.schema.get_field_index("prompt")
        pq.write_table(rows.set_column(column, "prompt", pa.array(range(_ROWS))), bad)
        ended = lab.start(where, [*lab.overrides("hf", out), f"data.train_files=[{bad}]"]).ended()
        check_refused(result, ended, (2,), f"DataError: {bad}: ", "field 'prompt': is of type int")
        result.facts["seconds"] = round(slowest, 2)
        result.need(not (left := where.leftovers()), f"left: {'; '.join(left[:6])}")
