"""What can go wrong at the door, told once and clearly.

`ConfigError` and `DataError` are for the user: they say what is wrong, where, what was expected and how to mend it.
Faults of our own are `assert`s. All classes pickle, because worker processes raise them too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


def file_and_row(id: str) -> tuple[str, int | None]:
    """The file and the row that an id `file#row` names; (id, None) for an id of another form."""
    file, _, row = id.rpartition("#")
    return (file, int(row)) if file and row.isdecimal() else (id, None)


class VerlError(Exception):
    """Base of every error a user can mend."""


class ConfigError(VerlError, ValueError):
    """A setting that is unknown, has a wrong value or cannot work in this environment."""


@dataclass(eq=False)
class DataError(VerlError, ValueError):
    """A data file or row that cannot be used.

    problem:  what is wrong, in one clause
    expected: what a good value looks like
    mend:     what the user can do about it
    file, row, field: where; `row` counts from 0 as pyarrow and pandas do
    """

    problem: str
    expected: str = ""
    hint: str = ""
    file: str = ""
    row: int | None = None
    field: str = ""

    def at(self, *, file: str = "", row: int | None = None, field: str = "") -> DataError:
        """A copy of this error that knows its place; what is already known is kept."""
        return replace(
            self, file=self.file or file, row=row if self.row is None else self.row, field=self.field or field
        )

    def of_row(self, id: str) -> DataError:
        """A copy of this error for what was read from the row that an id (`file#row`) names."""
        file, row = file_and_row(id)
        return self.at(file=file, row=row)

    def __str__(self) -> str:
        place = [self.file] if self.file else []
        if self.row is not None:
            place.append(f"row {self.row}")
        if self.field:
            place.append(f"field {self.field!r}")
        text = f"{', '.join(place)}: {self.problem}" if place else self.problem
        if self.expected:
            text += f"; expected {self.expected}"
        return f"{text}. {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[type[DataError], tuple[object, ...]]:
        return type(self), (self.problem, self.expected, self.hint, self.file, self.row, self.field)


class EngineError(VerlError):
    """A rollout engine that did not start, has died or cannot be trusted any more."""


class EngineLostError(EngineError):
    """A rollout engine that works no more: another one must take its place."""


class LostRequestError(EngineError):
    """A request that was asked twice, of engines that were lost both times."""


class ServiceDownError(VerlError):
    """Something that tools and environments need does not work or does not answer. It is never the policy's fault.

    tool: whose call it ended, where that is known
    """

    def __init__(self, service: str, problem: str, tool: str | None = None) -> None:
        super().__init__(service, problem, tool)
        self.service, self.problem, self.tool = service, problem, tool

    def __str__(self) -> str:
        return f"{self.service}: {self.problem}"


class JudgeError(VerlError):
    """An environment could not judge an episode, or not in time. It is never the policy's fault.

    The episode is not played again: those that cannot be judged would be replaced by others that can.
    """
