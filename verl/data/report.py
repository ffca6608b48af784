"""One-line report of how many rows of a data file are used, noted or dropped."""

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from verl.errors import DataError

_SHOWN_BAD_ROWS = 3
_SHOWN_CHARS = 100
CHOICES = ("reward", "env")  # columns that select code by name
_INDEX = re.compile(r"\[\d+\]")


@dataclass
class RowReport:
    """Counts of a file's rows: used ones, perhaps with a note, and dropped ones, with the reason.

    num_rows: rows read
    num_split: tasks beyond one per row, of rows with several assistant turns
    bad:      errors of unusable rows
    unlisted: errors of rows that are used although their gold answer calls a tool that the prompt does not list
    notes:    {note: number of other used rows}
    dropped:  {reason: number of usable rows that are left out}
    """

    source: str
    num_rows: int = 0
    num_split: int = 0
    bad: list[DataError] = field(default_factory=list)
    unlisted: list[DataError] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def num_used(self) -> int:
        return self.num_rows + self.num_split - self.num_dropped

    @property
    def num_dropped(self) -> int:
        return len(self.bad) + self.dropped.total()

    def add_bad(self, error: DataError, max_bad_share: float) -> None:
        """Count an unusable row. Raises its error if no bad rows are allowed, or if the row names an unknown reward or
        environment: a wrong name is an error of the configuration, not a share of bad data."""
        if error.field in CHOICES:
            raise error
        if max_bad_share == 0:
            error.hint = error.hint or "Correct the row, or set data.max_bad_share to skip a share of bad rows"
            raise error
        self.bad.append(error)
        self._forget(error.row)

    def drop(self, reason: str, row: int | None) -> None:
        """Count a usable row that is left out."""
        self.dropped[reason] += 1
        self._forget(row)

    def _forget(self, row: int | None) -> None:
        self.unlisted = [error for error in self.unlisted if error.row != row]

    def check(self, max_bad_share: float) -> None:
        """Raises DataError, naming the first bad rows, if they exceed this share of the rows read."""
        # a division, because 0.29 * 100 < 29 in floats
        if self.bad and len(self.bad) / (self.num_rows + self.num_split) > max_bad_share:
            num_bad = len({error.row for error in self.bad})  # each task of a row may be bad
            first = "; ".join(str(replace(error, file="", hint="")) for error in self.bad[:_SHOWN_BAD_ROWS])
            raise DataError(
                f"{num_bad} of {self.num_rows} rows cannot be used, more than max_bad_share={max_bad_share:g} "
                f"allows{_in_brackets(self._notes())}; the first: {first}",
                hint=f"{self.bad[0].hint or 'Correct them'}, or raise data.max_bad_share",
                file=self.source,
            )
        if not self.num_used:
            hint = self.bad[0].hint if self.bad else ""
            raise DataError(f"has no usable row{_in_brackets(self._reasons())}", "at least one", hint, self.source)

    def __str__(self) -> str:
        """As in `train.parquet: 80 rows, 79 used (17 cut to the last 1024 tokens), 1 dropped (..)`."""
        notes = self._notes()
        if self.unlisted:
            notes.append(f"{len(self.unlisted)} with gold calls of unlisted tools, {_rows(self.unlisted)}")
        used = f"{self.num_used} used{_in_brackets(notes)}"
        dropped = f"{self.num_dropped} dropped{_in_brackets(self._reasons())}"
        tasks = f" with {self.num_rows + self.num_split} tasks" if self.num_split else ""
        return f"{Path(self.source).name}: {self.num_rows} rows{tasks}, {used}, {dropped}"

    def _notes(self) -> list[str]:
        return [f"{count} {note}" for note, count in self.notes.items()]

    def _reasons(self) -> list[str]:
        reasons = [f"{count} {reason}" for reason, count in self.dropped.items()]
        by_field: dict[str, list[DataError]] = {}
        for error in self.bad:
            by_field.setdefault(_INDEX.sub("", error.field), []).append(error)
        for name, errors in by_field.items():
            problem = " ".join(errors[0].problem.split())
            shown = problem if len(problem) <= _SHOWN_CHARS else f"{problem[:_SHOWN_CHARS]}.."
            what = f"with a bad {name}" if name else "unreadable"
            reasons.append(f"{len(errors)} {what}, {_rows(errors)}: {shown}")
        return reasons


def _rows(errors: list[DataError]) -> str:
    shown = ", ".join(str(error.row) for error in errors[:_SHOWN_BAD_ROWS])
    return f"row{'s' * (len(errors) > 1)} {shown}{', ..' * (len(errors) > _SHOWN_BAD_ROWS)}"


def _in_brackets(parts: list[str]) -> str:
    return f" ({'; '.join(parts)})" if parts else ""
