"""Python objects as settings: callables are pickled, rows are written to files, values become `key=value` arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import cloudpickle

from verl.embedded import EMBEDDED, PREFIX
from verl.errors import ConfigError, DataError
from verl.host.files import replacing
from verl.registry import nearest
from verl.tracking.jsonl import write_jsonl
from verl.utils.reward_score.base import REWARDS


class BuiltinRewards:
    """`toolrl.rewards.NAME`: the name of a built-in reward."""

    def __getattr__(self, name: str) -> str:
        if name not in REWARDS:
            raise AttributeError(f"there is no reward {name!r}; {nearest(name, list(REWARDS))}")
        return name

    def __dir__(self) -> list[str]:
        return list(REWARDS)


rewards = BuiltinRewards()


class Objects:
    """The callables among the settings, each under a name of its own, for one file that `verl.registry` reads.

    cloudpickle sends functions and classes of a notebook or script whole, with the globals that they use; those of an
    imported module are imported again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._named: dict[str, Any] = {}

    def name(self, value: Any) -> Any:
        """The value of a setting with `file.pkl:name` in place of every callable and tool."""
        if isinstance(value, Mapping):
            return {key: self.name(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.name(each) for each in value]
        is_object = callable(value) or hasattr(value, "spec")  # `spec`: of a tool
        return f"{self.path}:{self._add(value)}" if is_object else value

    def write(self) -> None:
        """Raises ConfigError for an object that cannot be pickled."""
        if not self._named:
            return
        try:
            pickled = cloudpickle.dumps(self._named)
        except Exception as error:  # whatever the object's own pickling raises
            raise ConfigError(
                f"{', '.join(filter(self._is_unsendable, self._named))} cannot be sent to other processes ({error}); "
                "open files, connections and models inside the function, or in a class's __init__, not as globals"
            ) from error
        with replacing(self.path) as unfinished:
            unfinished.write_bytes(pickled)

    def _is_unsendable(self, name: str) -> bool:
        try:
            cloudpickle.dumps(self._named[name])
        except Exception:  # noqa: BLE001  as above
            return True
        return False

    def _add(self, value: Any) -> str:
        own = getattr(value, "__name__", type(value).__name__)
        base = own if own.isidentifier() else "function"  # a lambda
        names = (base if number == 1 else f"{base}_{number}" for number in range(1, len(self._named) + 2))
        name = next(each for each in names if self._named.get(each, value) is value)
        self._named[name] = value
        return name


def data_files(argument: str, data: Any, path: Path) -> tuple[list[str], Callable[[], None]]:
    """The files or data set names of the argument `data` or `val_data`, and what writes its rows to `path`, suffixed.

    data: a file or data set name or several, rows (mappings), or what has `to_parquet`: a datasets.Dataset, a DataFrame
    """
    if isinstance(data, str | Path):
        return [_file(data)], _write_nothing
    if isinstance(data, Mapping) or not (isinstance(data, Iterable) or hasattr(data, "to_parquet")):
        raise ConfigError(f"{argument}: {_EXPECTED}, not an object of type {type(data).__name__}")
    is_table = hasattr(data, "to_parquet")  # Parquet keeps the types, by which the reader distinguishes fill values
    rows = data if is_table else list(data)
    if hasattr(rows, "__len__") and not len(rows):  # a streamed data set has no length
        raise ConfigError(f"{argument}: is empty")
    if is_table:
        return [str(path.with_suffix(".parquet"))], partial(_write_table, rows, path.with_suffix(".parquet"))
    if all(isinstance(each, str | Path) for each in rows):
        return [_file(each) for each in rows], _write_nothing
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(f"is of type {type(row).__name__}", "a dict", file=argument, row=number)
    return [str(path.with_suffix(".jsonl"))], partial(_write_rows, argument, rows, path.with_suffix(".jsonl"))


_EXPECTED = "a file, a data set's name, several of them, rows (dicts), a datasets.Dataset or a DataFrame"


def _write_nothing() -> None:
    """No-op: the data is in files already."""


def _write_table(table: Any, path: Path) -> None:
    with replacing(path) as unfinished:
        table.to_parquet(str(unfinished))


def _write_rows(argument: str, rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    try:
        write_jsonl(path, rows)
    except (TypeError, ValueError) as error:
        hint = "Texts, numbers, booleans, lists and dicts"
        raise DataError(f"a row cannot be written as JSON ({error})", hint=hint, file=argument) from error


def _file(source: str | Path) -> str:
    return str(source) if str(source).startswith(PREFIX) else str(Path(source).expanduser())


def model_path(model: str | Path) -> str:
    """A folder, a hub name, or `embedded`."""
    check_type("model", model, str | Path, 'a folder, a hub name or "embedded"')
    return f"{PREFIX}model" if model == EMBEDDED else _file(model)


def check_type(argument: str, value: Any, kinds: Any, expected: str) -> None:
    """Raises ConfigError for a value of another type."""
    if not isinstance(value, kinds):
        raise ConfigError(f"{argument}: {expected}, not an object of type {type(value).__name__}")


def argument(key: str, value: Any) -> str:
    """`key=value` of the command line. Raises ConfigError for a value that it cannot express."""
    return f"{key}={_write(key, value)}"


def _write(key: str, value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Integral | Real):  # numpy's, too
        return repr(int(value) if isinstance(value, Integral) else float(value))
    if isinstance(value, str | Path):
        return _quote(str(value))
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{_write(key, each)}" for name, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_write(key, each) for each in value) + "]"
    known = "a text, a number, a list, a dict, a function nor a class"
    raise ConfigError(f"{key}: an object of type {type(value).__name__} is neither {known}")


def _quote(text: str) -> str:
    """In single quotes. Backslashes are escapes only where a quote follows them."""
    parts = text.split("'")
    ends = [part + "\\" * (len(part) - len(part.rstrip("\\"))) for part in parts]
    return "'" + "\\'".join(ends) + "'"
