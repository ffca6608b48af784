"""Rows of data files: streamed, stored on disk, fetched by index.

No file is held in memory: 1,000,000 rows take 8 MB plus one batch.
"""

import csv
import gzip
import hashlib
import importlib
import json
import os
import re
import tempfile
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from verl.errors import DataError
from verl.host.digests import file_digest, folder_digests
from verl.host.hub import HubDownError, ask_hub
from verl.host.task_folders import find_task_folders, read_task_folders
from verl.json_values import JsonError, as_json_value, check_values, read_json, strict_decoder

_BATCH_ROWS = 512
_CHUNK_CHARS = 1 << 20
_MOST_DECODED = 1 << 26  # bytes of a parquet file that is decoded before its rows are read
_LONGEST_LINE = 1 << 26  # characters per row; a small .gz may contain a line that does not fit into memory
_HALF = re.compile("[\ud800-\udfff]")
_HUB_NAME = re.compile(
    r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<config>[\w.-]+))?(:(?P<split>\w+))?(\?(?P<revision>[\w./-]+))?"
)
_HUB_FORM = "owner/name[@configuration][:split][?revision]"
_DEEPEST = 100  # maximum nesting of lists and objects in a row; copying recurses
DATA_VERSIONS = "data_versions.jsonl"  # in a run's folder: `version_of` every data file
_NOT_JSON = re.compile("arrow.json|map<|binary|date|time|duration|interval|decimal|extension")  # Arrow types
_JSON_TYPES = (str, dict, list, int, float, bool, type(None), tuple, Mapping)  # the frequent ones first
_VALUES = "texts, numbers, booleans, lists and objects"
_FORMATS = ".parquet, .jsonl, .jsonl.gz, .json (a list of objects) or .csv"


def read_rows(source: str) -> Iterator[Any]:
    """Yields the rows of a parquet, jsonl(.gz), json or csv file, of a folder, or of a data set on the hub.

    A data set is `owner/name[@configuration][:split][?revision]`, where a revision is a branch, tag or commit.

    Parquet is read with pyarrow, folders and hub names with the package datasets. JSON and csv are parsed here:
    datasets and pyarrow would convert them to typed columns, where a key of one row becomes a null in all others, mixed
    types become JSON text, and the texts 007 and NA become 7 and null. All values of a csv file are texts. A folder is
    a clone of a data set's repository, the output of `save_to_disk` of datasets, or one of task folders
    (verl/host/task_folders.py). The default split is "train".

    A row is made of JSON values: times and decimals of a typed column are texts, a map is an object. A jsonl line that
    is not JSON, or a csv line with a wrong number of values, is yielded as its DataError, for the caller to raise or to
    count; so is a row with a key twice, NaN, an infinity or a lone surrogate in its JSON, or nested too deeply to be
    copied. Values that have no form in JSON, such as bytes, are left: only those that are used are errors.

    Raises DataError for a file that is missing or does not have the format of its extension.
    """
    path = Path(source)
    readers = {".parquet": _read_parquet, ".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv}
    suffix = ".jsonl" if path.name.endswith(".jsonl.gz") else path.suffix
    is_folder = os.path.isdir(source)  # noqa: PTH112  as below
    if suffix not in readers or is_folder:
        folders = find_task_folders(path) if is_folder else []
        yield from map(checked_row, read_task_folders(folders) if folders else _read_dataset(source))
        return
    if not os.path.isfile(source):  # noqa: PTH113  Path.is_file raises if the name is too long
        raise DataError("there is no such file", _FORMATS, "Check the path", file=source)
    with _unreadable(source, suffix[1:]):
        yield from map(checked_row, readers[suffix](path))


def check_pages(source: str) -> None:
    """Decode a parquet file without making rows, which takes a second for the largest that is tried.

    Raises DataError for damage: long before the rows are read, which waits for slow imports.
    """
    path = Path(source)
    if path.suffix == ".parquet" and path.stat().st_size <= _MOST_DECODED:
        with _unreadable(source, "parquet"), _parquet(path) as file:
            for _ in file.iter_batches(batch_size=_BATCH_ROWS):
                pass


@contextmanager
def _unreadable(source: str, form: str) -> Iterator[None]:
    """A DataError in place of what the readers of files raise."""
    try:
        yield
    except (OSError, ValueError, RecursionError, EOFError, zlib.error) as error:
        problem = f"cannot be read as {form} ({_one_line(error)})"
        raise DataError(problem, hint="Write or copy it again", file=source) from error


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    """The open file. pyarrow's errors, of which some are no ValueErrors, are ValueErrors."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # pre-buffering would hold the whole compressed file in memory instead of one batch
        options: dict[str, Any] = {"pre_buffer": False, "buffer_size": 1 << 20, "page_checksum_verification": True}
        with pq.ParquetFile(path, **options) as file:
            yield file
    except pa.ArrowException as error:
        raise ValueError(str(error)) from error


def _read_parquet(path: Path) -> Iterator[Any]:
    import pyarrow as pa

    with _parquet(path) as file:
        names = Counter(file.schema_arrow.names)
        if twice := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"it has several columns with the name {twice[0]}")
        kind = pa.struct(list(file.schema_arrow))
        is_typed = bool(_NOT_JSON.search(str(kind)))
        for batch in file.iter_batches(batch_size=_BATCH_ROWS):
            yield from _typed_rows(batch, kind) if is_typed else batch.to_pylist()


def _typed_rows(batch: Any, kind: Any) -> Iterator[Any]:
    """Rows with columns of other types than JSON has, one at a time: a bad one does not spoil the others."""
    for number in range(batch.num_rows):
        try:
            (row,) = batch.slice(number, 1).to_pylist(maps_as_pydicts="strict")
        except (KeyError, ValueError, OverflowError, TypeError) as error:  # key twice; a list as key; too large a time
            yield DataError(f"has a value that cannot be read ({_one_line(error)})", _VALUES)
            continue
        try:
            yield _as_json(row, kind, "")
        except DataError as error:
            yield error


class JsonObject(dict[str, Any]):
    """An object that a typed column holds as JSON text: its nulls were written, they fill nothing."""


_STRICT, _JSON_COLUMN = strict_decoder(), strict_decoder(JsonObject)


def _as_json(value: Any, kind: Any, place: str) -> Any:
    """The value of an Arrow type, with `arrow.json` texts decoded, in which datasets writes values of mixed types.

    Raises DataError with the field.
    """
    import pyarrow as pa

    if value is None:
        return None
    if isinstance(kind, pa.JsonType):
        return _decoded(value, place)
    if pa.types.is_struct(kind):
        names = {field.name: f"{place}.{field.name}".removeprefix(".") for field in kind}
        return {field.name: _as_json(value[field.name], field.type, names[field.name]) for field in kind}
    if pa.types.is_map(kind):
        try:
            keys = as_json_value(dict.fromkeys(value)).keys()  # a key may be a number or a date
        except TypeError:
            return value  # it may not be used
        except JsonError as error:
            raise error.in_data(place) from error
        return {
            name: _as_json(each, kind.item_type, f"{place}.{name}")
            for name, each in zip(keys, value.values(), strict=True)
        }
    if isinstance(value, list):
        return [_as_json(each, kind.value_type, f"{place}[{number}]") for number, each in enumerate(value)]
    return _converted(value)


def _decoded(text: str, place: str) -> Any:
    try:
        return read_json(text, _JSON_COLUMN)
    except JsonError as error:
        raise error.in_data(place) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not JSON ({_one_line(error)})", field=place) from error


def _read_jsonl(path: Path) -> Iterator[Any]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8-sig") as file:
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE + 1), ""), 1):
            if len(line) > _LONGEST_LINE:
                raise ValueError(f"line {number} has more than {_LONGEST_LINE} characters")
            if line.strip():
                try:
                    yield read_json(line)
                except JsonError as error:
                    yield error.in_data()
                except (ValueError, RecursionError) as error:
                    yield DataError(f"line {number} is not JSON ({_one_line(error)})", "one object per line")


def _read_json(path: Path) -> Iterator[Any]:
    """Yields the elements of a JSON list, decoded one at a time to save memory."""
    with path.open(encoding="utf-8-sig") as file:
        text, ended = file.read(_CHUNK_CHARS), False
        position = _after_blanks(text, 0) + 1
        if text[position - 1 : position] != "[":
            raise ValueError("it does not start with [")
        while True:
            position = _after_blanks(text, position)
            if text[position : position + 1] == "]":
                return
            try:
                value, end = _element(text, position)
                after = _after_blanks(text, end)
                if text[after : after + 1] not in (",", "]"):
                    raise json.JSONDecodeError("Expecting ',' or ']'", text, after)
            except json.JSONDecodeError as error:
                if ended:
                    raise ValueError(f"{error.msg} near {text[position : position + 40]!r}") from error
                text, position = text[position:], 0
                more = file.read(max(_CHUNK_CHARS, len(text)))  # doubling keeps a huge element linear
                text, ended = text + more, not more
                continue
            yield value
            position = after + (text[after] == ",")


def _element(text: str, position: int) -> tuple[Any, int]:
    """(the JSON value at this position, or its DataError; its end). Raises JSONDecodeError."""
    try:
        return _STRICT.raw_decode(text, position)
    except JsonError:
        _, end = json.JSONDecoder().raw_decode(text, position)
        try:
            return read_json(text[position:end]), end
        except JsonError as error:
            return error.in_data(), end


def checked_row(row: Any) -> Any:
    """The row, made of JSON values; a DataError if it is nested too deeply or has a lone surrogate."""
    if isinstance(row, DataError):
        return row
    is_json = True
    for column, content in row.items() if isinstance(row, Mapping) else [("", row)]:
        level, depth = [column, content], 1
        while level:
            is_json = is_json and all(map(_is_json, level))
            if depth > _DEEPEST:
                return DataError(f"has a value nested in more than {_DEEPEST} lists and objects", "less nesting")
            if any(isinstance(each, str) and not each.isascii() and _HALF.search(each) for each in level):
                return DataError("has a lone surrogate, which no tokenizer accepts", "valid Unicode", field=column)
            level, depth = [each for value in level for each in _inner(value)], depth + 1
    if is_json or not isinstance(row, Mapping):
        return row
    made = {}
    for column, content in row.items():
        try:
            made[column] = _converted(content)
        except JsonError as error:
            return error.in_data(column)
    return made


def _is_json(value: Any) -> bool:
    """Whether the value, leaving aside what is in it, is one of JSON."""
    return isinstance(value, _JSON_TYPES) and not (isinstance(value, Mapping) and not all(map(_is_text, value)))


def _is_text(key: Any) -> bool:
    return isinstance(key, str)


def _converted(value: Any) -> Any:
    """The value as JSON, or unchanged if it has no such form: it may not be used."""
    try:
        return as_json_value(value)
    except TypeError:
        return value


def _inner(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    return value if isinstance(value, list | tuple) else ()


def _after_blanks(text: str, position: int) -> int:
    while text[position : position + 1] in (" ", "\n", "\r", "\t"):
        position += 1
    return position


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _read_csv(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file, strict=True)
        try:
            names = next(lines, [])
            if not names or len(set(names)) != len(names) or not all(names):
                raise ValueError(f"its first line does not name the columns: {', '.join(names) or 'it is empty'}")
            for values in lines:
                if len(values) == len(names):
                    yield dict(zip(names, values, strict=True))
                elif values:
                    yield DataError(f"line {lines.line_num} has {len(values)} values", f"{len(names)}, one per column")
        except csv.Error as error:
            raise ValueError(str(error)) from error


def _read_dataset(source: str) -> Iterator[Any]:
    is_folder = os.path.isdir(source)  # noqa: PTH112  Path.is_dir raises if the name is too long
    if not is_folder and (os.path.exists(source) or not _HUB_NAME.fullmatch(source)):  # noqa: PTH110  as above
        expected = f"{_FORMATS}, a folder, or {_HUB_FORM}"
        raise DataError("is neither a data file nor a data set's name", expected, "Check it", file=source)
    datasets = _import("datasets", source)  # heavy, and not needed for files
    try:
        if not is_folder:
            hub = _hub_name(source)
            options = {"name": hub["config"], "split": hub["split"] or "train", "revision": _commit(source)}
            yield from datasets.load_dataset(hub["name"], **options, streaming=True)
        elif os.path.isfile(os.path.join(source, "state.json")):  # noqa: PTH113, PTH118  as above
            yield from datasets.load_from_disk(source)
        else:
            yield from datasets.load_dataset(source, split="train", streaming=True)
    except Exception as error:  # network errors depend on the HTTP client of datasets
        if isinstance(error, DataError):
            raise
        hint = "Check the name, the files and the network"
        raise DataError(f"cannot be loaded ({_one_line(error)})", hint=hint, file=source) from error


def _import(package: str, source: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise DataError(
            f"needs the package {package}, which cannot be imported ({error})",
            hint="pip install datasets, or give the path of a file",
            file=source,
        ) from error


def _hub_name(source: str) -> Mapping[str, str | None]:
    found = _HUB_NAME.fullmatch(source)
    assert found is not None
    return found.groupdict()


@cache
def _commit(source: str) -> str:
    """The commit of a data set on the hub, so that all reads of a run see the same rows. Raises DataError."""
    hub = _hub_name(source)
    _import("huggingface_hub", source)
    try:
        found = ask_hub("dataset", str(hub["name"]), hub["revision"])
    except HubDownError as error:
        raise DataError(str(error), file=source) from error
    except Exception as error:  # as in _read_dataset
        hint = "Check the name, the revision and the network"
        raise DataError(f"cannot be loaded ({_one_line(error)})", hint=hint, file=source) from error
    return str(found.sha)


def version_of(source: str) -> dict[str, str]:
    """What identifies the rows in a run's record: the hash of a file, or of a folder's files; or the hub's commit."""
    path = Path(source)
    if not path.exists():
        return {"source": source, "revision": _commit(source)}
    if path.is_file():
        return {"source": source, "sha256": file_digest(path)}
    listing = "".join(f"{each}  {name}\n" for name, each in folder_digests(path).items())  # as sha256sum writes it
    return {"source": source, "sha256": hashlib.sha256(listing.encode()).hexdigest()}


@contextmanager
def _disk_errors(directory: str | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        place = directory or tempfile.gettempdir()
        hint = "Free some space or point TMPDIR to a larger disk"
        raise DataError(f"cannot store the rows in {place} ({error})", hint=hint) from error


def encoded(row: Any) -> bytes:
    """A row, or a data class, as JSON. Raises DataError for NaN, an infinity and what JSON does not have."""
    try:
        return json.dumps(row, separators=(",", ":"), allow_nan=False, default=_fields_of).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise _not_stored(row, error) from error


def _fields_of(value: Any) -> dict[str, Any]:
    """`dataclasses.asdict` would copy all that is in them, which takes a tenth of the time to check a row."""
    if not is_dataclass(value):
        raise TypeError(f"{type(value).__name__} is no JSON value")
    return {each.name: getattr(value, each.name) for each in fields(value)}


def _not_stored(row: Any, error: Exception) -> DataError:
    try:
        check_values(asdict(row) if is_dataclass(row) and not isinstance(row, type) else row)
    except JsonError as found:
        return found.in_data()
    except RecursionError:
        pass
    return DataError(f"has a value that JSON cannot store ({_one_line(error)})", _VALUES)


class RowStore:
    """JSON values on disk, in an unnamed temporary file, fetched by index.

    Memory: 8 bytes per row. The file is deleted with the store; `directory` chooses its disk (default: TMPDIR).
    """

    def __init__(self, rows: Iterable[bytes], directory: str | None = None) -> None:
        """Write all rows to disk, each as `encoded` gives it. Raises DataError if the disk is full."""
        self._starts = array("q", [0])
        with _disk_errors(directory):
            self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  closed with the store
        for row in rows:
            with _disk_errors(directory):
                self._file.write(row)
            self._starts.append(self._starts[-1] + len(row))
        with _disk_errors(directory):
            self._file.flush()

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(number)
        start, end = self._starts[number], self._starts[number + 1]
        return json.loads(os.pread(self._file.fileno(), end - start, start))

    def close(self) -> None:
        """Free the disk space now rather than at garbage collection."""
        self._file.close()
