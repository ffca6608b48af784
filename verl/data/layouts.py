"""Row layouts, each converted to OpenAI's {messages, tools}, or to a task row.

A row's layout follows from its columns and their types. Those of published data sets are plug-ins.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from verl.data.trl_rows import with_completion, with_pair, with_prompt
from verl.errors import DataError
from verl.plugins import LAYOUTS, Plugin

Row = Mapping[str, Any]


class ConvertedRow(dict[str, Any]):
    """A row in OpenAI's layout. notes: what it lacks of the published row, for the RowReport"""

    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Layout:
    """columns: those that identify it, with their types; `conversations.from` is a field of the first element."""

    name: str
    columns: Mapping[str, tuple[type, ...]]
    convert: Callable[[Row], Row]

    def fits(self, row: Row) -> bool:
        found = ((_at(row, path), kinds) for path, kinds in self.columns.items())
        return all(value is not None and isinstance(value, kinds) for value, kinds in found)

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.columns)})"


def as_openai_row(row: Any) -> Row:
    """The row in OpenAI's layout, or unchanged if it is a task, a demonstration or already OpenAI's.

    Raises DataError for an unknown layout.
    """
    if isinstance(row, DataError):
        raise row  # an undecodable line
    if not isinstance(row, Mapping):
        raise DataError(f"is of type {type(row).__name__}", "an object with messages, or prompt and reward_model")
    layout = next((each for each in layouts() if each.fits(row)), None)
    if layout is None and "reward_model" in row:
        return row  # a task that lacks its prompt
    if layout is None:
        found = ", ".join(f"{name} ({type(value).__name__})" for name, value in row.items()) or "none"
        raise DataError(
            f"has the columns {found}, which are no known layout",
            f"one of {'; '.join(map(str, layouts()))}",
            "Rename columns with data.columns={theirs: ours}, or convert rows with data.map=file.py:function",
        )
    try:
        return layout.convert(row)
    except DataError as error:
        error.hint = error.hint or f"The row was read as {layout.name}; data.map=file.py:function converts others"
        raise


def _at(row: Row, path: str) -> Any:
    """The value of a column, or of a field in the first element of a list."""
    column, _, key = path.partition(".")
    value = row.get(column)
    if not key:
        return value
    first = value[0] if isinstance(value, list | tuple) and value else None
    return first.get(key) if isinstance(first, Mapping) else None


def _unchanged(row: Row) -> Row:
    return row


_TURNS = (str, list, tuple)
OWN = (
    Layout("TRL's pair", {"chosen": _TURNS, "rejected": _TURNS}, with_pair),
    Layout("TRL's prompt and completion", {"prompt": _TURNS, "completion": _TURNS}, with_completion),
    Layout("TRL's prompt", {"prompt": (list, tuple)}, with_prompt),
    Layout("a task", {"prompt": (object,)}, _unchanged),
    Layout("OpenAI", {"messages": (object,)}, _unchanged),
    Layout("ToolRL's SFT file", {"input": (str,), "output": (str,)}, _unchanged),
)


@cache
def layouts() -> tuple[Layout, ...]:
    """Ours, and the published ones that are installed; a row has the first that fits."""
    published: list[Plugin[Layout]] = [Plugin(path) for path in LAYOUTS.values()]
    return (*OWN, *(layout for each in published if (layout := each.find()) is not None))
