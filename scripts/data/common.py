"""Shared by the data scripts: reading, checking, a seeded split, writing, and a summary table.

The split is one of the published rows, also of those that are skipped: a bad row moves no other to the other side.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl.data.rows import RowStore, encoded, read_rows
from verl.data.tasks import to_task
from verl.errors import DataError, VerlError
from verl.host.exits import write_error
from verl.host.files import ending_in, replacing
from verl.sft.demonstrations import to_demonstration

Row = dict[str, Any]
Convert = Callable[[Any, argparse.Namespace], Iterable[Row]]  # one published row -> the resulting rows

_WRITE_ROWS = 1000
_MESSAGES = pa.list_(pa.struct([("content", pa.string()), ("role", pa.string())]))
TASKS = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", _MESSAGES),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("ground_truth", pa.string()), ("style", pa.string())])),
        ("extra_info", pa.struct([("id", pa.string()), ("index", pa.int64()), ("split", pa.string())])),
    ]
)
DEMONSTRATIONS = pa.schema([("messages", _MESSAGES)])


def task(data_source: str, ability: str, prompt: Sequence[Mapping[str, str]], answer: str, id: str) -> Row:
    """A row of TASKS; its index and split are added when it is written."""
    return {
        "data_source": data_source,
        "prompt": [dict(message) for message in prompt],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"id": id},
    }


def text(row: Any, *names: str) -> str:
    """The first of these fields in the row. Raises DataError if it is missing or not a text."""
    if isinstance(row, DataError):
        raise row
    for name in names:
        if isinstance(row, Mapping) and name in row:
            if not isinstance(row[name], str) or not row[name].strip():
                raise DataError("is empty or no text", "a text", field=name)
            found: str = row[name]
            return found
    raise DataError("is missing", "a text", field=" or ".join(names))


def parser(description: str | None) -> argparse.ArgumentParser:
    """The common options of the data scripts."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--input", required=True, action="append", metavar="FILE", help="may be given several times")
    output = ending_in(".parquet", ".jsonl")
    options.add_argument("--output", required=True, type=output, metavar="FILE.parquet|FILE.jsonl")
    options.add_argument("--test-fraction", type=_share, default=0.0, help="of the published rows, in <output>_test")
    options.add_argument("--seed", type=int, default=0, help="seed of the split")
    options.add_argument("--skip-bad-rows", action="store_true", help="count and skip unusable rows")
    return options


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share in [0, 1)")
    return value


def run(arguments: argparse.Namespace, convert: Convert, schema: pa.Schema = TASKS) -> int:
    """Convert every row of every input; returns the exit code."""
    console = Console(stderr=True)
    dropped: Counter[str] = Counter()
    output: Path = arguments.output
    try:
        store = RowStore(map(encoded, _converted(arguments, convert, dropped)))
        if not any(store[number] for number in range(len(store))):
            raise DataError("has no usable row", "at least one", file=", ".join(arguments.input))
        order = list(range(len(store)))
        num_held_out = round(len(order) * arguments.test_fraction)
        if num_held_out:
            random.Random(arguments.seed).shuffle(order)
        splits = {output: order[: len(order) - num_held_out]}
        if num_held_out:
            splits[output.with_stem(f"{output.stem}_test")] = order[len(order) - num_held_out :]
        written = {
            path: _write(path, (row for number in numbers for row in store[number]), schema, split)
            for (path, numbers), split in zip(splits.items(), ("train", "test"), strict=False)
        }
    except VerlError as error:
        return write_error(error)
    table = Table("what", "rows", title="Summary")
    for path, rows in written.items():
        table.add_row(escape(str(path)), str(rows))
    for why, count in dropped.most_common():
        table.add_row(f"dropped: {escape(why)}", str(count))
    console.print(table)
    return 0


def _converted(arguments: argparse.Namespace, convert: Convert, dropped: Counter[str]) -> Iterator[list[Row]]:
    """For every published row the rows that it becomes; none for a bad one."""
    for source in arguments.input:
        for number, row in enumerate(read_rows(source)):
            try:
                yield _checked(row, convert, arguments)
            except DataError as error:
                if not arguments.skip_bad_rows:
                    error.hint = error.hint or "Fix or drop the row, or skip all such rows with --skip-bad-rows"
                    raise error.at(file=source, row=number) from error
                dropped[f"{error.field} {error.problem}".strip()] += 1
                yield []


def _checked(row: Any, convert: Convert, arguments: argparse.Namespace) -> list[Row]:
    """The rows from one published row, after the checks of training."""
    if isinstance(row, DataError):
        raise row
    try:
        made = list(convert(row, arguments))
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"is not of the expected form ({type(error).__name__}: {error})") from error
    for each in made:
        to_demonstration(each) if "messages" in each else to_task(each, "")
    return made


def _write(path: Path, rows: Iterator[Row], schema: pa.Schema, split: str) -> int:
    """Write the rows in the form that the path's ending names. Returns their number."""
    write = _write_parquet if path.suffix == ".parquet" else _write_lines
    with replacing(path) as unfinished:
        return write(unfinished, _numbered(rows, split), schema)


def _numbered(rows: Iterator[Row], split: str) -> Iterator[Row]:
    for index, row in enumerate(rows):
        if "extra_info" in row:
            row["extra_info"] |= {"index": index, "split": split}
        yield row


def _write_parquet(path: Path, rows: Iterator[Row], schema: pa.Schema) -> int:
    count = 0
    with pq.ParquetWriter(path, schema) as writer:
        while batch := list(islice(rows, _WRITE_ROWS)):
            writer.write_table(pa.Table.from_pylist(batch, schema))
            count += len(batch)
    return count


def _write_lines(path: Path, rows: Iterator[Row], schema: pa.Schema) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for count, row in enumerate(rows, 1):  # noqa: B007  the number of the last row
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return count
