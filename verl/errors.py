"""Exceptions with messages for the user.

`ConfigError` and `DataError` state what is wrong, where, what was expected and how to fix it. Internal errors are
`assert`s. All classes pickle, because worker processes raise them too.
"""

from dataclasses import dataclass, replace
from typing import Self


def file_and_row(id: str) -> tuple[str, int | None]:
    """The file and the row that an id names: `file#row`, or `file#row.task` if the row has several tasks.

    (id, None) for an id of another form.
    """
    file, _, row = id.rpartition("#")
    row = row.partition(".")[0]
    return (file, int(row)) if file and row.isdecimal() else (id, None)


class VerlError(Exception):
    """Base class of all errors that a user can fix."""


class ConfigError(VerlError, ValueError):
    """A setting that is unknown, has an invalid value or cannot work in this environment."""


@dataclass(eq=False)
class DataError(VerlError, ValueError):
    """A data file or row that cannot be used.

    problem:  what is wrong, in one clause
    expected: what a good value looks like
    hint:     how the user can fix it
    file, row, field: location; `row` is 0-based as in pyarrow and pandas
    """

    problem: str
    expected: str = ""
    hint: str = ""
    file: str = ""
    row: int | None = None
    field: str = ""

    def at(self, *, file: str = "", row: int | None = None, field: str = "") -> Self:
        """A copy of this error with its location; fields that are already set are kept."""
        row = row if self.row is None else self.row
        return replace(self, file=self.file or file, row=row, field=self.field or field)

    def of_row(self, id: str) -> Self:
        """A copy of this error with the location given by an id (`file#row`)."""
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

    def __reduce__(self) -> tuple[type[Self], tuple[object, ...]]:
        return type(self), (self.problem, self.expected, self.hint, self.file, self.row, self.field)


class EngineError(VerlError):
    """A rollout engine did not start, died or is in an inconsistent state."""


class EngineLostError(EngineError):
    """A rollout engine failed permanently and must be replaced."""


class LostRequestError(EngineError):
    """A request failed twice because the engine was lost both times."""


class ServiceDownError(VerlError):
    """A service that tools or environments need does not work. Never the policy's fault. tool: whose call failed"""

    def __init__(self, service: str, problem: str, tool: str | None = None) -> None:
        super().__init__(service, problem, tool)
        self.service, self.problem, self.tool = service, problem, tool

    def __str__(self) -> str:
        return f"{self.service}: {self.problem}"


class EpisodeLostError(ServiceDownError):
    """What an episode did was lost with a service before its verdict: it begins anew, as after a failure in a step."""


class JudgeError(VerlError):
    """An environment could not judge an episode in time. Not retried: that would bias the sample."""
