"""results.jsonl: a line per measurement, written at once and copied to the folder that comes back from the machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from bench.gpu.measurements import FAILED, OK, SKIPPED, Measurement, Row
from bench.gpu.rows import read_rows
from bench.gpu.table import latest, markdown
from verl.errors import DataError
from verl.host.files import replacing
from verl.tracking.jsonl import write_jsonl

NAME, TABLE = "results.jsonl", "table.md"
_LOG_BYTES = 2**18  # of a failed measurement's log


class Ledger:
    """Lines of this call and of earlier ones in `work`; copies in `out`, at most `num_files` files.

    A folder that cannot be written costs a message, not the results: they are kept and printed.
    anew: measurements whose earlier lines do not count
    Raises DataError for lines that are none.
    """

    def __init__(self, work: Path, out: Path, num_files: int, anew: Collection[str] = ()) -> None:
        self.path, self.out = work / NAME, out
        self._num_files = num_files
        self.rows: list[Row] = read_rows(self.path) if self.path.exists() else []
        self._ignored = [row for row in self.rows if row["name"] in anew]

    def last(self, name: str) -> Row | None:
        return next(iter(reversed(self._of(name))), None)

    def failures(self, name: str) -> int:
        return sum(row["state"] == FAILED for row in self._of(name))

    def has_failures(self) -> bool:
        """Whether the last line of any measurement is a failure."""
        return FAILED in {row["name"]: row["state"] for row in self.rows}.values()

    def is_done(self, name: str) -> bool:
        last = self.last(name)
        return last is not None and last["state"] == OK

    def _of(self, name: str) -> list[Row]:
        return [row for row in self.rows if row["name"] == name and not any(row is each for each in self._ignored)]

    def add(self, row: Mapping[str, Any]) -> None:
        """A measurement that is skipped again has no further line."""
        last = self.last(row["name"])
        if last is not None and last["state"] == row["state"] == SKIPPED and last["reason"] == row["reason"]:
            return
        self.rows.append(dict(row))
        try:
            write_jsonl(self.path, self.rows)
        except DataError as error:
            report(f"{error} (the result is kept in memory)")
        self.copy_out()
        report(described(row))

    def copy_out(self) -> None:
        """All lines, those of earlier calls included."""
        self._copy(NAME, "".join(json.dumps(each) + "\n" for each in self.rows))

    def add_log(self, name: str, log: Path) -> None:
        """The end of a failed measurement's log, if there is room for another file."""
        if log.exists():
            with log.open("rb") as file:
                file.seek(max(0, log.stat().st_size - _LOG_BYTES))
                self._copy(
                    f"{name}.log", file.read().decode(errors="replace"), reserved=3
                )  # for the others, and one that is being replaced

    def write_table(self, measurements: Sequence[Measurement]) -> None:
        rows = [row for each in measurements if (row := self.last(each.name))]
        text = markdown(rows)
        self._copy(TABLE, text)
        _print(text, sys.stdout)

    def _copy(self, name: str, text: str, reserved: int = 0) -> None:
        """reserved: files for which there must be room, too"""
        path = self.out / name
        try:
            there = {each.relative_to(self.out) for each in self.out.rglob("*") if each.is_file()}
            room = self._num_files - len(there - {Path(NAME), Path(TABLE), Path(name)})
            if room <= reserved:
                report(f"{path} is left out: {len(there)} of {self._num_files} files are there already")
                return
            with replacing(path) as unfinished:
                unfinished.write_text(text, encoding="utf-8")
        except (DataError, OSError) as error:
            report(f"{error} (the results are in {self.path})")


def described(row: Row) -> str:
    """One line about a measurement."""
    seconds = f" in {row['seconds']:.0f} s" if row["seconds"] else ""
    reason = f": {row['reason']}" if row["reason"] else ""
    return f"{row['name']}: {row['state']}{seconds}{reason}"


def report(line: str) -> None:
    _print(line, sys.stderr)


def _print(text: str, stream: TextIO) -> None:
    """A closed output and a full disk cost the text and no measurement."""
    with suppress(OSError):
        print(text, file=stream, flush=True)


def seed(work: Path, done: Path, rehearse: bool) -> None:
    """Take results of an earlier machine, unless this one has some. What failed there is tried anew.

    Raises DataError if `done` holds no results.
    """
    if not (rows := read_rows(done)):
        raise DataError("holds no results", hint="Give a results.jsonl that came back", file=str(done))
    for number, row in enumerate(rows, start=1):
        if row["rehearsal"] != rehearse:
            kind = "a rehearsal" if row["rehearsal"] else "a GPU"
            raise DataError(f"is a result of {kind}", hint="Give results of the same kind", file=f"{done}:{number}")
    if not (work / NAME).exists():
        write_jsonl(work / NAME, [row for row in latest(rows) if row["state"] == OK])
