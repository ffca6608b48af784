"""Columns, a map function and data sets on the hub, and what the record of a run holds of them."""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.verl.data.test_conversations import DIALOGUE, RAIN, WIND, row
from toolrl.check.lab.__main__ import main as lab
from verl.config.load import load_config
from verl.config.schema import DataConfig
from verl.data import rows
from verl.data.rows import read_rows, version_of
from verl.data.source import source_name, source_rows
from verl.data.tasks import TaskSet
from verl.errors import ConfigError, DataError
from verl.sft.demonstrations import read_demonstrations

MAP = """
def turns(row):
    if row["log"] is None:
        return []
    if row["log"] == "error":
        raise KeyError("log")
    return [{"messages": [{"role": "user", "content": each}], "data_source": "log"} for each in row["log"].split("|")]

def one(row):
    return {**row, "chat": row["chat"][:3]}
"""


@pytest.fixture
def functions(tmp_path: Path) -> str:
    path = tmp_path / "convert.py"
    path.write_text(MAP)
    return str(path)


def write(path: Path, *given: Any) -> str:
    path.write_text("".join(json.dumps(each) + "\n" for each in given))
    return str(path)


def test_columns_are_renamed(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", {"chat": DIALOGUE, "functions_of_it": [RAIN, WIND]})
    data = DataConfig(columns={"chat": "messages", "functions_of_it": "tools"})
    assert list(TaskSet(path, data=data)) == list(TaskSet(write(tmp_path / "mine.jsonl", row())))


def test_the_columns_of_a_parquet_file_lose_their_fill_values_after_renaming(tmp_path: Path) -> None:
    """All structs of an Arrow column have all fields, with nulls."""
    table = pa.Table.from_pylist([{"chat": DIALOGUE, "tools": json.dumps([RAIN, WIND])}])
    pq.write_table(table, tmp_path / "mine.parquet")
    tasks = TaskSet(str(tmp_path / "mine.parquet"), data=DataConfig(columns={"chat": "messages"}))
    assert [task.gold for task in tasks] == [task.gold for task in TaskSet(write(tmp_path / "mine.jsonl", row()))]


@pytest.mark.parametrize(
    ("columns", "field", "message"),
    [
        ({"chats": "messages"}, "chats", "is missing, but named in data.columns; expected one of messages, tools"),
        ({"tools": "messages"}, "messages", "is a column already, so 'tools' cannot be renamed to it"),
    ],
)
def test_a_column_that_cannot_be_renamed_is_named(
    columns: dict[str, str], field: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as caught:
        TaskSet(write(tmp_path / "mine.jsonl", row()), data=DataConfig(columns=columns))
    assert caught.value.field == field and caught.value.row == 0 and message in str(caught.value)


def test_a_function_makes_rows_of_a_row(tmp_path: Path, functions: str) -> None:
    path = write(tmp_path / "mine.jsonl", {"log": "a|b"}, {"log": None}, {"log": "c"})
    tasks = TaskSet(path, data=DataConfig(map=f"{functions}:turns"))
    assert [(task.id, task.prompt[0].content) for task in tasks] == [
        ("mine.jsonl#0.0", "a"),
        ("mine.jsonl#0.1", "b"),
        ("mine.jsonl#2", "c"),
    ]
    assert str(tasks.report) == "mine.jsonl: 3 rows with 4 tasks, 3 used, 1 dropped (1 left out by data.map)"


def test_the_function_comes_before_the_columns(tmp_path: Path, functions: str) -> None:
    path = write(tmp_path / "mine.jsonl", {"chat": DIALOGUE, "tools": [RAIN]})
    data = DataConfig(map=f"{functions}:one", columns={"chat": "messages"})
    (task,) = TaskSet(path, data=data)
    (demonstration,) = read_demonstrations(path, data=data)
    assert task.gold == demonstration.messages[-1] and task.gold is not None and task.gold.tool_calls


def test_a_function_that_fails_is_an_error_of_the_row(tmp_path: Path, functions: str) -> None:
    path = write(tmp_path / "mine.jsonl", {"log": "a"}, {"log": "error"})
    with pytest.raises(DataError, match=r"row 1: data.map fails \(KeyError: 'log'\)"):
        TaskSet(path, data=DataConfig(map=f"{functions}:turns"))
    with pytest.raises(ConfigError, match="has no 'turn'; did you mean 'turns'"):
        TaskSet(path, data=DataConfig(map=f"{functions}:turn"))


def test_the_lab_reads_rows_in_the_same_way(tmp_path: Path, functions: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "mine.jsonl", {"chat": DIALOGUE, "tools": [RAIN]})
    options = ["data.columns={chat: messages}", f"data.map={functions}:one", "env.tool_call_format=hermes"]
    assert lab([f"data={path}", *options]) == 0
    assert "1 rows tried, 0 with violations" in capsys.readouterr().out


def test_a_source_without_data_source_is_named_by_its_file() -> None:
    assert source_name("data/logs.jsonl.gz") == "logs" and source_name("a/b.c.parquet") == "b.c"
    assert source_name("owner/name@config:split?v1") == "name"


class Hub:
    """A stand-in for the hub and the package datasets: commits by revision, rows by configuration and split."""

    def __init__(self) -> None:
        self.commits = {None: "c0ffee", "v1": "beef"}
        self.asked: list[tuple[Any, ...]] = []

    def load_dataset(self, path: str, *, name: str | None, split: str, revision: str, streaming: bool) -> list[Any]:
        self.asked.append((path, name, split, revision, streaming))
        return [row()]

    def ask_hub(self, kind: str, name: str, revision: str | None) -> SimpleNamespace:
        assert kind == "dataset"
        return SimpleNamespace(sha=self.commits[revision])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub()
    monkeypatch.setitem(sys.modules, "datasets", made)
    monkeypatch.setattr(rows, "ask_hub", made.ask_hub)
    rows._commit.cache_clear()
    return made


@pytest.mark.parametrize(
    ("source", "config", "split", "revision"),
    [
        ("owner/name", None, "train", "c0ffee"),
        ("owner/na-me.2:test", None, "test", "c0ffee"),
        ("owner/name@main", "main", "train", "c0ffee"),
        ("owner/name@tool-use.v2:test?v1", "tool-use.v2", "test", "beef"),
        ("owner/name?v1", None, "train", "beef"),
    ],
)
def test_a_data_set_by_name_configuration_split_and_revision(
    hub: Hub, source: str, config: str | None, split: str, revision: str
) -> None:
    name = source.partition("@")[0].partition(":")[0].partition("?")[0]
    assert len(TaskSet(source)) == 2
    assert hub.asked == [(name, config, split, revision, True)]
    assert version_of(source) == {"source": source, "revision": revision}
    assert load_config([f"data={source}"]).data.train_files == [source]  # can be written on a command line


def test_a_missing_revision_is_named(hub: Hub) -> None:
    with pytest.raises(DataError, match=r"owner/name\?v9: cannot be loaded .*Check the name, the revision"):
        list(read_rows("owner/name?v9"))
    assert hub.asked == []


def test_the_version_of_files_is_a_hash_of_their_content(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", row())
    assert version_of(path) == {"source": path, "sha256": hashlib.sha256(Path(path).read_bytes()).hexdigest()}
    folder = {"source": str(tmp_path), "sha256": version_of(str(tmp_path))["sha256"]}
    (tmp_path / "mine.jsonl").rename(tmp_path / "other.jsonl")
    assert version_of(str(tmp_path)) != folder


def test_a_compressed_file_keeps_its_nulls(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "mine.jsonl.gz", "wt") as file:
        file.write(json.dumps(row()))
    ((read,),) = source_rows(str(tmp_path / "mine.jsonl.gz"))
    assert read == row()
