"""Reading tasks: every kind of bad row is named, and the stream is fair, seeded and resumable."""

from __future__ import annotations

import json
import logging
import pickle
import resource
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import real_data
from verl.data.rlla import SCHEMA, Tool, dialogue, to_row, tool_list
from verl.data.rows import RowStore, read_rows
from verl.data.tasks import TaskSet, TaskStream, to_task
from verl.errors import ConfigError, DataError
from verl.types import Message
from verl.utils.reward_score.parsing import render_reply

INSTRUCTION = "Use tools.\n\n" + tool_list([Tool("get_weather", "Weather of a city"), Tool("get_time", "Time")])


def example(city: str = "Rome", name: str = "get_weather") -> dict[str, str]:
    call = {"name": name, "parameters": {"city": city}}
    return {
        "instruction": INSTRUCTION,
        "input": dialogue([f"<user> Weather in {city}? </user>"]),
        "output": render_reply("t", [call]),
    }


def row(**changes: Any) -> dict[str, Any]:
    return to_row(example(), "train", 0) | changes


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return str(path)


def test_a_good_row_becomes_a_task() -> None:
    task = to_task(row(), "train.parquet#0")
    assert task.prompt == (Message("system", INSTRUCTION), Message("user", example()["input"]))
    assert (task.answer, task.data_source, task.env, task.reward) == (example()["output"], "rlla", "single_turn", None)
    assert task.extra == {"split": "train", "index": 0}  # what repeats the prompt and the answer is left out


def test_optional_columns_choose_environment_and_reward() -> None:
    task = to_task(row(env="tool", reward="torl"), "x")
    assert (task.env, task.reward) == ("tool", "torl")


CALL = render_reply("t", [{"name": "get_weather", "parameters": {}}])
BAD_ROWS: dict[str, tuple[Any, str, str]] = {
    "not an object": (3, "", "is a int"),
    "no source": ({key: value for key, value in row().items() if key != "data_source"}, "data_source", "is missing"),
    "source of wrong type": (row(data_source=1), "data_source", "is of type int"),
    "no prompt": ({"data_source": "rlla"}, "prompt", "is missing"),
    "prompt is a text": (row(prompt="hi"), "prompt", "is of type str"),
    "empty prompt": (row(prompt=[]), "prompt", "is empty"),
    "message is a text": (row(prompt=["hi"]), "prompt[0]", "is of type str"),
    "message without content": (row(prompt=[{"role": "user"}]), "prompt[0].content", "is missing"),
    "message with null": (row(prompt=[{"role": "user", "content": None}]), "prompt[0].content", "is of type NoneType"),
    "blank last message": (row(prompt=[{"role": "user", "content": " \n"}]), "prompt[0].content", "is empty"),
    "no gold": (row(reward_model={"style": "rule"}), "reward_model.ground_truth", "is missing"),
    "gold is a number": (row(reward_model={"ground_truth": 4}), "reward_model.ground_truth", "is of type int"),
    "empty gold": (row(reward_model={"ground_truth": ""}), "reward_model.ground_truth", "is empty"),
    "gold does not parse": (
        row(reward_model={"ground_truth": CALL.replace("}", "")}),
        "reward_model.ground_truth",
        "line 1 of the gold calls is not JSON",
    ),
    "gold calls a stranger": (
        row(reward_model={"ground_truth": CALL.replace("get_weather", "get_news")}),
        "reward_model.ground_truth",
        "calls 'get_news', which the prompt does not list; expected one of 'get_weather', 'get_time'",
    ),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_named_with_file_row_and_field(case: str, tmp_path: Path) -> None:
    bad, field, said = BAD_ROWS[case]
    path = write_jsonl(tmp_path / "t.jsonl", [row(), bad])
    with pytest.raises(DataError) as caught:
        TaskSet(path)
    assert (caught.value.file, caught.value.row, caught.value.field) == (path, 1, field)
    assert said in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # crosses processes


def test_bad_rows_can_be_skipped_and_are_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [row(), *(bad for bad, _, _ in BAD_ROWS.values()), row()])
    with caplog.at_level(logging.WARNING):
        tasks = TaskSet(path, on_bad_row="skip")
    assert [task.id for task in tasks] == ["t.jsonl#0", f"t.jsonl#{len(BAD_ROWS) + 1}"]
    assert len(tasks.bad_rows) == len(BAD_ROWS)
    assert f"skipped {len(BAD_ROWS)} bad rows, kept 2" in caplog.text
    assert "row 1" in caplog.text and f"and {len(BAD_ROWS) - 10} more" in caplog.text


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("missing.parquet", None, "there is no such file"),
        ("torn.parquet", "PAR1 not really", "cannot be read as parquet"),
        ("torn.jsonl", '{"a": 1}\n{"a"', "row 1: is not JSON"),
        ("torn.json", '[{"a": 1}, {"a"', "is not JSON"),
        ("folder/notes.txt", None, "needs the package datasets|neither a data file"),
        ("empty.jsonl", "", "has no usable row"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(name: str, text: str | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=said):
        TaskSet(str(path), on_bad_row="skip")


def test_a_wrong_policy_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="error or skip"):
        TaskSet(write_jsonl(tmp_path / "t.jsonl", [row()]), on_bad_row="ignore")  # type: ignore[arg-type]


def test_the_same_rows_in_parquet_jsonl_and_json(tmp_path: Path) -> None:
    rows = [to_row(example(city), "train", index) for index, city in enumerate(("Rome", "Oslo"))]
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), tmp_path / "t.parquet")
    write_jsonl(tmp_path / "t.jsonl", rows)
    (tmp_path / "t.json").write_text(json.dumps(rows))
    assert all(list(read_rows(str(tmp_path / f"t.{kind}"))) == rows for kind in ("parquet", "jsonl", "json"))


def test_other_data_sources_are_not_held_to_toolrls_grammar() -> None:
    other = row(data_source="math", prompt=[{"role": "user", "content": "1+1"}], reward_model={"ground_truth": "2"})
    assert to_task(other, "x").answer == "2"


def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))  # no file may grow beyond 10 kB
    try:
        with pytest.raises(DataError, match=f"cannot keep the rows in {tmp_path} .*TMPDIR"):
            RowStore(("x" * 1000 for _ in range(100)), directory=str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.raises(DataError, match="cannot keep the rows in /nowhere"):
        RowStore([1], directory="/nowhere")


def test_row_store_gives_back_what_it_was_given() -> None:
    rows = [{"a": "\ud800 é\n"}, [1, 2.5, None], "x" * 100_000, 7]
    store = RowStore(rows)
    assert [store[number] for number in (3, 0, 2, 1)] == [rows[3], rows[0], rows[2], rows[1]]
    with pytest.raises(IndexError):
        store[4]


def tasks_named(name: str, count: int, folder: Path) -> TaskSet:
    return TaskSet(write_jsonl(folder / f"{name}.jsonl", [row()] * count))


def ids(stream: TaskStream, count: int) -> list[str]:
    return [task.id for task in islice(stream, count)]


def test_an_epoch_is_every_task_once_and_each_epoch_has_its_own_order(tmp_path: Path) -> None:
    sets = [tasks_named("a", 7, tmp_path), tasks_named("b", 3, tmp_path)]
    stream = TaskStream(sets, seed=1)
    first, second = ids(stream, len(stream)), ids(stream, len(stream))
    assert Counter(first) == Counter(second) == Counter({task.id: 1 for tasks in sets for task in tasks})
    assert first != second
    assert ids(TaskStream(sets, seed=1), 10) == first != ids(TaskStream(sets, seed=2), 10)


def test_weights_hold_in_every_stretch(tmp_path: Path) -> None:
    stream = TaskStream([tasks_named("a", 5, tmp_path), tasks_named("b", 50, tmp_path)], weights=[3, 1])
    drawn = [id[0] for id in ids(stream, 80)]
    assert all(drawn[start : start + 4].count("a") == 3 for start in range(0, 80, 4))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(0, 30), st.integers(0, 9), st.data())
def test_a_cursor_resumes_exactly(sizes: list[int], stop: int, seed: int, data: st.DataObject) -> None:
    weights = data.draw(st.none() | st.lists(st.floats(0.1, 10), min_size=len(sizes), max_size=len(sizes)))
    sets = [[to_task(row(), f"{file}#{number}") for number in range(size)] for file, size in enumerate(sizes)]
    whole = TaskStream(sets, weights, seed)
    expected = ids(whole, stop + 20)
    started = TaskStream(sets, weights, seed)
    ids(started, stop)
    resumed = TaskStream(sets, weights, seed, cursor=started.cursor)
    assert ids(resumed, 20) == expected[stop:]


def test_resuming_over_other_files_is_refused(tmp_path: Path) -> None:
    cursor = TaskStream([tasks_named("a", 3, tmp_path)]).cursor
    with pytest.raises(DataError, match=r"had \[3\] rows when the run was saved and has \[4\] now"):
        TaskStream([tasks_named("b", 4, tmp_path)], cursor=cursor)


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, -2.0], [1.0, float("nan")]])
def test_bad_weights_are_a_config_error(weights: list[float], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2 positive numbers"):
        TaskStream([tasks_named("a", 1, tmp_path), tasks_named("b", 1, tmp_path)], weights)


def test_toolrls_own_file_is_read_unchanged() -> None:
    """The published test split: 79 good rows, and one whose gold calls a tool by half its name."""
    tasks = TaskSet(str(real_data("toolrl", "rlla_test.parquet")), on_bad_row="skip")
    assert len(tasks) == 79
    assert [(bad.row, bad.field) for bad in tasks.bad_rows] == [(9, "reward_model.ground_truth")]
    assert sum("<tool_call>" in task.answer for task in tasks) == 70
