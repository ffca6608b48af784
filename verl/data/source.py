"""Rows as tasks and demonstrations read them: mapped, renamed, without fill values, in a known layout."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.config.schema import DataConfig
from verl.data.layouts import ConvertedRow, as_openai_row
from verl.data.messages import read_object
from verl.data.rows import JsonObject, checked_row, read_rows
from verl.errors import DataError
from verl.registry import resolve

_TRUTH = "ground_truth"  # in veRL's layout within reward_model
_CHAT_COLUMNS = ("prompt", "messages", "tools", "reward_model", _TRUTH, "conversations", "answers")
_UNTYPED = (".json", ".jsonl", ".gz")  # formats without a schema: rows have only the fields that were written


AS_WRITTEN = DataConfig()


def source_name(source: str) -> str:
    """A file's name without its suffixes, or a data set's without owner, configuration and split."""
    name = Path(source).name
    for suffix in (".gz", ".parquet", ".jsonl", ".json", ".csv"):
        name = name.removesuffix(suffix)
    return re.split("[@:?]", name)[0]


def source_rows(source: str, data: DataConfig = AS_WRITTEN) -> Iterator[list[Any]]:
    """For every row of `read_rows` the rows that it becomes: one, or those of `map`; a DataError in place of a bad one.

    Raises ConfigError for an unknown `map`.
    """
    mapped: Callable[[Any], Any] | None = None
    if data.map is not None:
        mapped = resolve("data.map", data.map, {})
    for row in read_rows(source):
        try:
            yield [_read(each, source, data) for each in _mapped(row, mapped)]
        except DataError as error:
            yield [error]


def notes_of(rows: Sequence[Any]) -> list[str]:
    """What their layouts left out of these rows, for the report."""
    return [note for row in rows if isinstance(row, ConvertedRow) for note in row.notes]


def _mapped(row: Any, function: Callable[[Any], Any] | None) -> list[Any]:
    if function is None or isinstance(row, DataError):
        return [row]
    try:
        made = function(row)
    except Exception as error:  # the user's code
        hint = "Correct the function, or the row"
        raise DataError(f"data.map fails ({type(error).__name__}: {error})", hint=hint) from error
    return [checked_row(each) for each in (made if isinstance(made, list) else [made])]


def _read(row: Any, source: str, data: DataConfig) -> Any:
    if isinstance(row, Mapping):
        row = _with_messages(_with_gold(_without_fill_values(_renamed(row, data.columns), Path(source).suffix)))
    return as_openai_row(row)


def _with_messages(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A prompt that is a text, as in rows for TRL, is the user's message."""
    prompt = row.get("prompt")
    if not isinstance(prompt, str) or prompt.lstrip().startswith("["):  # JSON text
        return row
    return {**row, "prompt": [{"role": "user", "content": prompt}], "text_prompt": True}


def _with_gold(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A column ground_truth where veRL's layout has it. Raises DataError for two that differ."""
    if (truth := row.get(_TRUTH)) is None:
        return row
    model = read_object(row, "reward_model") if row.get("reward_model") is not None else {}
    if (other := model.get(_TRUTH)) is not None and _text(other) != _text(truth):
        raise DataError(f"differs from reward_model.{_TRUTH}", hint="Remove one of the columns", field=_TRUTH)
    others = {name: value for name, value in row.items() if name != _TRUTH}
    return {**others, "reward_model": {**model, _TRUTH: truth if other is None else other}}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _renamed(row: Mapping[str, Any], columns: Mapping[str, str]) -> Mapping[str, Any]:
    for theirs, ours in columns.items():
        if theirs not in row:
            found = f"one of {', '.join(row)}"
            raise DataError("is missing, but named in data.columns", found, "Correct data.columns", field=theirs)
        if ours in row and ours not in columns:
            hint = "Rename one of them in data.columns"
            raise DataError(f"is a column already, so {theirs!r} cannot be renamed to it", hint=hint, field=ours)
    return {columns.get(name, name): value for name, value in row.items()}


def _without_fill_values(row: Mapping[str, Any], suffix: str) -> Mapping[str, Any]:
    """The row without the values with which its file format fills absent fields.

    All structs of an Arrow column have the same fields, with nulls for those that a message, schema or answer lacks. An
    empty csv cell is an empty text. In JSON a null was written on purpose and is kept.
    """
    if suffix in _UNTYPED:
        return row
    if suffix == ".csv":
        return {key: value for key, value in row.items() if value != ""}
    return {key: _without_filling(key, value) for key, value in row.items()}


def _without_filling(column: str, value: Any) -> Any:
    if column == "extra_info" and isinstance(value, Mapping) and "tools" in value:
        return {**value, "tools": _without_nulls(value["tools"])}
    return _without_nulls(value) if column in _CHAT_COLUMNS else value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, JsonObject):
        return value
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list | tuple) else value
