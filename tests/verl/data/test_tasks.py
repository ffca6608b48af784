"""Reading tasks: every kind of bad row is named, and the stream is fair, seeded and resumable."""

from __future__ import annotations

import csv
import gzip
import json
import pickle
import resource
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, date, datetime, timedelta
from datetime import time as clock
from decimal import Decimal
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.raw.rlla import SCHEMA, ListedTool, dialogue, to_row, tool_list
from tests.conftest import real_data
from verl.config.load import load_config
from verl.config.schema import DataConfig
from verl.data.report import RowReport
from verl.data.rows import RowStore, encoded, read_rows
from verl.data.tasks import TaskCursor, TaskSet, TaskStream, to_task
from verl.errors import ConfigError, DataError
from verl.formats.toolrl_text import render_response
from verl.types import Message

pytestmark = pytest.mark.usefixtures("small_heap")
LISTED = [ListedTool("get_weather", "Weather of a city"), ListedTool("get_time", "Time")]
INSTRUCTION = "Use tools.\n\n" + tool_list(LISTED)


def example(city: str = "Rome", name: str = "get_weather") -> dict[str, str]:
    call = {"name": name, "parameters": {"city": city}}
    return {
        "instruction": INSTRUCTION,
        "input": dialogue([f"<user> Weather in {city}? </user>"]),
        "output": render_response("t", [call]),
    }


def row(**changes: Any) -> dict[str, Any]:
    return to_row(example(), "train", 0) | changes


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return str(path)


def test_a_good_row_becomes_a_task() -> None:
    task = to_task(row(), "train.parquet#0")
    assert task.prompt == (Message("system", INSTRUCTION), Message("user", example()["input"]))
    assert (task.answer, task.data_source, task.env, task.reward) == (example()["output"], "rlla", None, None)
    assert task.extra == row()["extra_info"]  # the prompt and the answer once more, too: rewards of users may read them


def test_optional_columns_choose_environment_and_reward() -> None:
    task = to_task(row(env="tool", reward="torl"), "x")
    assert (task.env, task.reward) == ("tool", "torl")


CALL = render_response("t", [{"name": "get_weather", "parameters": {}}])
BAD_ROWS: dict[str, tuple[Any, str, str]] = {
    "not an object": (3, "", "is of type int"),
    "source is empty": (row(data_source=""), "data_source", "is empty"),
    "source of wrong type": (row(data_source=1), "data_source", "is of type int"),
    "no prompt": ({"data_source": "rlla", "reward_model": {"ground_truth": "x"}}, "prompt", "is missing"),
    "prompt is a text": (row(prompt="[hi"), "prompt", "is not JSON"),
    "empty prompt": (row(prompt=[]), "prompt", "is empty"),
    "message is a text": (row(prompt=["hi"]), "prompt[0]", "is of type str"),
    "message without content": (row(prompt=[{"role": "user"}]), "prompt[0].content", "is missing"),
    "message with null": (row(prompt=[{"role": "user", "content": None}]), "prompt[0].content", "is missing"),
    "blank last message": (row(prompt=[{"role": "user", "content": " \n"}]), "prompt[0].content", "is empty"),
    "no gold": (row(reward_model={"style": "rule"}), "reward_model.ground_truth", "is missing"),
    "gold is null": (row(reward_model={"ground_truth": None}), "reward_model.ground_truth", "is missing"),
    "gold is no number": (
        row(reward_model={"ground_truth": float("nan")}),
        "reward_model.ground_truth",
        "is not valid JSON: NaN is not a number",
    ),
    "empty gold": (row(reward_model={"ground_truth": ""}), "reward_model.ground_truth", "is empty"),
    "gold does not parse": (
        row(reward_model={"ground_truth": CALL.replace("}", "")}),
        "reward_model.ground_truth",
        "line 1 of the gold calls is not JSON",
    ),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_named_with_file_row_and_field(case: str, tmp_path: Path) -> None:
    bad, field, message = BAD_ROWS[case]
    path = write_jsonl(tmp_path / "t.jsonl", [row(), bad])
    with pytest.raises(DataError) as caught:
        TaskSet(path)
    assert (caught.value.file, caught.value.row, caught.value.field) == (path, 1, field)
    assert message in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # crosses processes


def test_bad_rows_can_be_left_out_and_are_counted(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [row(), *(bad for bad, _, _ in BAD_ROWS.values()), row()])
    tasks = TaskSet(path, max_bad_share=1.0)
    assert [task.id for task in tasks] == ["t.jsonl#0", f"t.jsonl#{len(BAD_ROWS) + 1}"]
    assert [error.row for error in tasks.report.bad] == list(range(1, len(BAD_ROWS) + 1))
    report = str(tasks.report)
    assert report.startswith(
        f"t.jsonl: {len(BAD_ROWS) + 2} rows, 2 used, {len(BAD_ROWS)} dropped (1 unreadable, row 1: "
    )
    assert "2 with a bad data_source, rows 2, 3: is empty;" in report and "\n" not in report


@pytest.mark.parametrize(("share", "allowed"), [(0.0, False), (0.19, False), (0.2, True), (1.0, True)])
def test_more_bad_rows_than_allowed_stop_the_run_and_are_named(share: float, allowed: bool, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [row(), row(prompt=[]), *[row()] * 7, 5])
    if allowed:
        assert len(TaskSet(path, share)) == 8
    else:
        message = (
            "2 of 10 rows .* more than max_bad_share=0.19 .* row 1, field 'prompt': .*; row 9: " if share else "row 1,"
        )
        with pytest.raises(DataError, match=message):
            TaskSet(path, share)


def test_a_gold_call_of_an_unlisted_tool_is_kept_and_counted(tmp_path: Path) -> None:
    """As ToolRL trains on it; the reward lab lists it (tests/toolrl/check/lab/test_lab.py)."""
    stranger = row(reward_model={"ground_truth": CALL.replace("get_weather", "get_news")})
    tasks = TaskSet(write_jsonl(tmp_path / "t.jsonl", [row(), stranger]))
    assert len(tasks) == 2
    assert str(tasks.report) == "t.jsonl: 2 rows, 2 used (1 with gold calls of unlisted tools, row 1), 0 dropped"
    (error,) = tasks.report.unlisted
    assert "calls 'get_news', which the prompt does not list; expected one of 'get_weather', 'get_time'" in str(error)


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        ("as it is ", "as it is "),
        ({"target": ["A", "Ä"]}, '{"target": ["A", "Ä"]}'),
        ([{"name": "f", "arguments": {}}], '[{"name": "f", "arguments": {}}]'),
        ([], "[]"),
        (4, "4"),
        (0.5, "0.5"),
        (True, "true"),
    ],
)
def test_a_ground_truth_that_is_no_text_becomes_its_json(truth: Any, answer: str) -> None:
    prompt = [{"role": "user", "content": "1+1"}]
    task = to_task(row(data_source="math", prompt=prompt, reward_model={"ground_truth": truth}), "x")
    assert task.answer == answer
    if not isinstance(truth, str):
        assert json.loads(task.answer) == truth


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("missing.parquet", None, "there is no such file"),
        ("long" * 100 + ".jsonl", None, "there is no such file"),
        ("torn.parquet", "PAR1 not really", "cannot be read as parquet"),
        ("torn.json", '[{"a": 1}, {"a"', "cannot be read as json"),
        ("object.json", '{"a": 1}', "does not start with"),
        ("deep.json", f"[{'[' * 100_000}", "cannot be read as json"),
        ("folder/notes.txt", None, "neither a data file"),
        ("empty.jsonl", "", "has no usable row"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(name: str, text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=message):
        TaskSet(str(path), max_bad_share=1.0)


@pytest.mark.parametrize("name", ["t.jsonl", "t.json"])
@pytest.mark.parametrize("content", [b"\xff\xfe[\x00", b"\x1f\x8b\x08\x00[", b"[\xe9]"])
def test_a_file_of_another_encoding_is_named(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=name):
        TaskSet(str(tmp_path / name))


def test_a_line_that_is_not_json_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(f"{json.dumps(row())}\n\n{{torn\n{'[' * 100_000}\n{json.dumps(row())}\n")
    with pytest.raises(DataError, match=r"t\.jsonl, row 1: line 3 is not JSON"):
        TaskSet(str(path))
    tasks = TaskSet(str(path), max_bad_share=1.0)
    assert [task.id for task in tasks] == ["t.jsonl#0", "t.jsonl#3"] and len(tasks.report.bad) == 2


def test_a_row_that_is_nested_too_deep_to_be_copied_is_a_bad_row(tmp_path: Path) -> None:
    deep: dict[str, Any] = {}
    for _ in range(900):
        deep = {"deeper": deep}
    path = tmp_path / "t.jsonl"
    path.write_text(f"{json.dumps(row())}\n{json.dumps({**row(), 'extra_info': deep})}\n")
    with pytest.raises(DataError, match=r"t\.jsonl, row 1: has a value nested in more than 100 lists and objects"):
        TaskSet(str(path))
    assert len(TaskSet(str(path), max_bad_share=1.0)) == 1


def test_a_small_archive_of_a_giant_line_is_refused_before_it_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl.data.rows._LONGEST_LINE", 1 << 20)
    path = tmp_path / "t.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(f"{json.dumps(row())}\n")
        for _ in range(64):
            file.write("\0" * (1 << 20))
    assert path.stat().st_size < 100_000
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"t\.jsonl\.gz: cannot be read as jsonl \(line 2 has more than 1048576"):
            TaskSet(str(path))
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


QUESTION = [{"role": "user", "content": "1+1"}]


def tasks_of(tmp_path: Path, *rows: dict[str, Any], suffix: str = "jsonl", **data: Any) -> TaskSet:
    file = tmp_path / f"mine.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist([*rows]), file)
    else:
        write_jsonl(file, [*rows])
    return TaskSet(str(file), data=DataConfig(**data))


CALLS = [{"name": "a", "arguments": {"x": 1}}, {"name": "b", "arguments": {"y": 2}}]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("chat", ["prompt", "messages"])
@pytest.mark.parametrize("truth", ["2", 2, ["2", "two"], CALLS])
def test_a_gold_may_have_a_column_of_its_own(chat: str, truth: Any, suffix: str, tmp_path: Path) -> None:
    alone, nested = {"ground_truth": truth}, {"reward_model": {"ground_truth": truth}}
    beside = {"reward_model": {"style": "rule", "ground_truth": None}, **alone}
    shared = {chat: QUESTION, "data_source": "math"}
    for gold in (alone, nested, alone | nested, beside):
        (task,) = tasks_of(tmp_path, {**shared, **gold}, suffix=suffix)
        assert task.answer == (truth if isinstance(truth, str) else json.dumps(truth))
    with pytest.raises(DataError, match=r"'ground_truth': differs from reward_model\.ground_truth"):
        tasks_of(tmp_path, {**shared, **alone, "reward_model": {"ground_truth": "3"}}, suffix=suffix)


@pytest.mark.parametrize("name", ["answer", "solution", "expected_answer"])
def test_a_gold_under_another_name_is_reported_with_what_makes_it_one(name: str, tmp_path: Path) -> None:
    setting = f"'data.columns={{{name}: ground_truth}}'"
    chat = {"messages": QUESTION, "data_source": "math", name: "2"}
    alone = {"prompt": QUESTION, "data_source": "math", name: "2"}
    tasks = tasks_of(tmp_path, chat, alone)
    assert f"2 with a column {name!r} that is not read: {setting} makes it the gold" in str(tasks.report)
    for row in (chat, alone):
        renamed = tasks_of(tmp_path, row, columns={name: "ground_truth"})
        assert [task.answer for task in renamed] == ["2"] and "not read" not in str(renamed.report)


def test_a_question_and_its_answer_are_a_task(tmp_path: Path) -> None:
    """As in GSM8K and in rows for TRL: texts, and no data_source."""
    rows = [{"question": "[1] + 1?", "answer": "#### 2"}, {"question": "1 + 1?", "answer": "#### 2"}]
    with pytest.raises(DataError, match="'prompt': is not JSON"):  # what begins like a list is one
        tasks_of(tmp_path, *rows, columns={"question": "prompt", "answer": "ground_truth"})
    (task,) = tasks_of(tmp_path, rows[1], columns={"question": "prompt", "answer": "ground_truth"})
    assert [(each.role, each.content) for each in task.prompt] == [("user", "1 + 1?")] and task.text_prompt
    assert (task.answer, task.data_source) == ("#### 2", "mine")


def test_other_columns_of_a_row_with_a_gold_are_no_golds(tmp_path: Path) -> None:
    answered = [*QUESTION, {"role": "assistant", "content": "2"}]
    nested = {"prompt": QUESTION, "data_source": "math", "reward_model": {"ground_truth": "2"}}
    for row in ({"messages": answered, "answer": "3"}, {**nested, "answer": "3"}, {"messages": QUESTION, "answer": ""}):
        assert not tasks_of(tmp_path, row).report.notes


PLAIN = row(data_source="math", prompt=[{"role": "user", "content": "HERE"}], reward_model={"ground_truth": "5"})
GOLD = row(data_source="math", prompt=[{"role": "user", "content": "1+1"}], reward_model={"ground_truth": "HERE"})
DIGITS = "9" * 6000


@pytest.mark.parametrize(
    ("shape", "value", "message"),
    [
        (PLAIN, '"a\0b"', "is not JSON"),
        (PLAIN, "1e999", r"'prompt\[0\]\.content': is not valid JSON: 1e999 is not a number"),
        (GOLD, "1e999", r"'reward_model\.ground_truth': is not valid JSON: 1e999 is not a number"),
        (GOLD, "-Infinity", r"'reward_model\.ground_truth': is not valid JSON: -Infinity is not a number"),
        (PLAIN, '"first", "content": "last"', r"'prompt\[0\]': has the key 'content' twice"),
        (GOLD, '{"a": [1, {"b": NaN}]}', r"'reward_model\.ground_truth\.a\[1\]\.b': is not valid JSON: NaN is not a"),
        (PLAIN, '"x"}], "prompt": [{"role": "user", "content": "y"', "has the key 'prompt' twice"),
        (PLAIN, DIGITS, "is not JSON .*6000 digits"),
        (GOLD, DIGITS, "is not JSON .*6000 digits"),
        (PLAIN, f'"a", "role": {DIGITS}', "is not JSON .*6000 digits"),
        (PLAIN, r'"a\ud83db"', "'prompt': has a lone surrogate"),
        (PLAIN, r'"a", "\ude00": 1', "'prompt': has a lone surrogate"),
        (GOLD, r'["\ude00"]', "'reward_model': has a lone surrogate"),
    ],
)
def test_nul_1e999_6000_digits_and_half_a_surrogate_pair_are_bad_rows(
    shape: dict[str, Any], value: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(f"{json.dumps(row())}\n{json.dumps(shape).replace(json.dumps('HERE'), value)}\n")
    with pytest.raises(DataError, match=rf"t\.jsonl, row 1.*{message}") as raised:
        TaskSet(str(path))
    assert len(str(raised.value)) < 1000
    assert len(TaskSet(str(path), max_bad_share=0.5)) == 1


@pytest.mark.parametrize(
    ("value", "content"),
    [
        (r'"a\u0000b"', "a\0b"),
        (r'"\ud83d\ude00 é"', "😀 é"),
        (json.dumps("a b " * 2_500_000), "a b " * 2_500_000),
    ],
    ids=["escaped NUL", "two halves", "10 MB"],
)
def test_an_escaped_nul_and_10_mb_of_content_are_read(value: str, content: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(PLAIN).replace('"HERE"', value))
    (task,) = TaskSet(str(path))
    assert task.prompt[-1].content == content


def test_a_row_of_many_messages_or_tools_is_read_in_linear_time(tmp_path: Path) -> None:
    def seconds(number: int, **changes: Any) -> float:
        path = write_jsonl(tmp_path / f"{number}.jsonl", [PLAIN | changes])
        began = time.process_time()
        (task,) = TaskSet(path)
        assert len(task.prompt) == number or len(task.tools) == number
        return time.process_time() - began

    for number in (10, 10_000):
        messages = [{"role": ("user", "assistant")[each % 2], "content": "x"} for each in range(number)]
        functions = ({"name": f"f{each}", "description": "d" * 1000} for each in range(number))
        tools = [{"type": "function", "function": each} for each in functions]
        assert seconds(number, prompt=messages) < 0.5 + number * 0.0003
        assert seconds(number, tools=tools) < 0.5 + number * 0.001


def parquet(tmp_path: Path, columns: Mapping[str, pa.Array], num_rows: int = 1) -> str:
    """Usable tasks with these columns, too."""
    table = pa.Table.from_pylist([row()] * num_rows).drop([name for name in columns if name in row()])
    for name, values in columns.items():
        table = table.append_column(name, values)
    pq.write_table(table, tmp_path / "t.parquet")
    return str(tmp_path / "t.parquet")


def extra(values: Sequence[Any], kind: pa.DataType) -> dict[str, pa.Array]:
    """extra_info with the field v of this type."""
    return {"extra_info": pa.StructArray.from_arrays([pa.array(values, kind)], ["v"])}


@pytest.mark.parametrize(
    ("value", "kind", "read"),
    [
        (datetime(2026, 1, 2, 3, 4, 5), pa.timestamp("us"), "2026-01-02T03:04:05"),
        (datetime(2026, 1, 2, 3, tzinfo=UTC), pa.timestamp("ms", "UTC"), "2026-01-02T03:00:00+00:00"),
        (date(2026, 1, 2), pa.date32(), "2026-01-02"),
        (clock(3, 4), pa.time64("us"), "03:04:00"),
        (Decimal("1.10"), pa.decimal128(5, 2), "1.10"),
        ([Decimal("1.10")], pa.list_(pa.decimal128(5, 2)), ["1.10"]),
        ([("a", 1), ("b", None)], pa.map_(pa.string(), pa.int64()), {"a": 1, "b": None}),
        ([(date(2026, 1, 2), Decimal(2))], pa.map_(pa.date32(), pa.decimal128(3, 0)), {"2026-01-02": "2"}),
        ([(7, [("x", 1)])], pa.map_(pa.int64(), pa.map_(pa.string(), pa.int64())), {"7": {"x": 1}}),
        ({"m": [("k", "v")]}, pa.struct([("m", pa.map_(pa.string(), pa.string()))]), {"m": {"k": "v"}}),
    ],
    ids=str,
)
def test_values_of_arrow_types_are_json_values(value: Any, kind: pa.DataType, read: Any, tmp_path: Path) -> None:
    (task,) = TaskSet(parquet(tmp_path, extra([value], kind)))
    assert task.extra == {"v": read}


@pytest.mark.parametrize(
    ("bad", "good", "kind", "message"),
    [
        (b"\xff", None, pa.binary(), "'extra.v': is of type bytes, which has no form in JSON"),
        (timedelta(1), None, pa.duration("s"), "'extra.v': is of type timedelta, which has no form"),
        (
            [("a", 1), ("a", 2)],
            [("a", 1)],
            pa.map_(pa.string(), pa.int64()),
            "a value that cannot be read .*duplicate",
        ),
        ([([1], 1)], [], pa.map_(pa.list_(pa.int64()), pa.int64()), "a value that cannot be read .*unhashable"),
        ([(b"a", 1)], [], pa.map_(pa.binary(), pa.int64()), "keys must be str, .*not bytes"),
        (
            [(float("nan"), 1), (float("nan"), 2)],
            [(1.5, 1)],
            pa.map_(pa.float64(), pa.int64()),
            "'extra_info.v': has the key 'NaN' twice",
        ),
        (10**15, 1, pa.timestamp("s"), "a value that cannot be read .*too large"),
        (float("nan"), 1.0, pa.float64(), "'extra.v': is not valid JSON: nan is not a number"),
        ('{"k": 1, "k": 2}', '{"k": 1}', pa.json_(), "'extra_info.v': has the key 'k' twice"),
        ('{"k": [1e400]}', '{"k": 1}', pa.json_(), r"'extra_info\.v\.k\[0\]': is not valid JSON: 1e400"),
    ],
    ids=str,
)
def test_values_that_json_does_not_have_are_bad_rows(
    bad: Any, good: Any, kind: pa.DataType, message: str, tmp_path: Path
) -> None:
    path = parquet(tmp_path, extra([good, bad, good], kind), num_rows=3)
    with pytest.raises(DataError, match=rf"t\.parquet, row 1\b.*{message}"):
        TaskSet(path)
    tasks = TaskSet(path, max_bad_share=0.5)
    assert len(tasks) == 2 and len(tasks.report.bad) == 1


def test_a_column_that_is_not_used_may_have_any_value(tmp_path: Path) -> None:
    image = pa.array([{"bytes": b"\xff", "at": datetime(2026, 1, 2)}])
    (task,) = TaskSet(parquet(tmp_path, {"image": image, "score": pa.array([float("nan")])}))
    assert task.id == "t.parquet#0"


def test_a_column_twice_is_refused(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([row()])
    pq.write_table(table.append_column("prompt", pa.array(["?"])), tmp_path / "t.parquet")
    with pytest.raises(DataError, match="several columns with the name prompt"):
        TaskSet(str(tmp_path / "t.parquet"))
    (tmp_path / "t.csv").write_text("prompt,prompt\na,b\n")
    with pytest.raises(DataError, match="does not name the columns: prompt, prompt"):
        TaskSet(str(tmp_path / "t.csv"))


@pytest.mark.parametrize("first", ['{"a": NaN}', '{"a": 1, "a": 2}', '{"a": 1e400}'])
def test_a_bad_element_of_a_json_list_is_one_bad_row(first: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(f"[{first}, {json.dumps(row())}]")
    with pytest.raises(DataError, match=r"t\.json, row 0.*(twice|not a number)"):
        TaskSet(str(path))
    assert [task.id for task in TaskSet(str(path), max_bad_share=0.5)] == ["t.json#1"]


def test_results_of_data_map_become_json_or_a_bad_row(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [row()])
    (tmp_path / "maps.py").write_text(
        "from datetime import date\nimport numpy as np\n"
        "def dated(row): return {**row, 'extra_info': {'on': date(2026, 1, 2), 'n': np.int64(3)}}\n"
        "def odd(row): return {**row, 'extra_info': {'what': object()}}\n"
        "def keys(row): return {**row, 'extra_info': {'m': {1: 'a', '1': 'b'}}}\n"
        "def number(row): return {**row, 'extra_info': {1: np.datetime64('2026-01-02', 'ns')}}\n"
    )
    (task,) = TaskSet(path, data=DataConfig(map=f"{tmp_path}/maps.py:dated"))
    assert task.extra == {"on": "2026-01-02", "n": 3}
    (task,) = TaskSet(path, data=DataConfig(map=f"{tmp_path}/maps.py:number"))
    assert task.extra == {"1": "2026-01-02T00:00:00.000000000"}
    with pytest.raises(DataError, match=r"t\.jsonl, row 0, field 'extra.what': is of type object, which has"):
        TaskSet(path, data=DataConfig(map=f"{tmp_path}/maps.py:odd"))
    with pytest.raises(DataError, match=r"t\.jsonl, row 0, field 'extra_info': has the key '1' twice"):
        TaskSet(path, data=DataConfig(map=f"{tmp_path}/maps.py:keys"))


finite = st.floats(allow_nan=False, allow_infinity=False)  # others are no JSON


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(st.lists(st.recursive(st.integers() | finite | st.text(), st.lists, max_leaves=5)), st.data())
def test_a_json_list_is_read_whole_however_it_is_cut(values: list[Any], data: st.DataObject) -> None:
    indent = data.draw(st.sampled_from([None, 0, 2]))
    text = data.draw(st.sampled_from(["", "\ufeff"])) + json.dumps(values, indent=indent)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("verl.data.rows._CHUNK_CHARS", data.draw(st.integers(1, 20)))
        Path(folder, "t.json").write_text(text, encoding="utf-8")
        assert list(read_rows(f"{folder}/t.json")) == values


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package datasets without a network, with a cache of its own."""
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.usefixtures("offline")
def test_a_folder_of_files_is_read_as_a_data_set(tmp_path: Path) -> None:
    """A clone of a data set's repository, read by the package itself: its split "train"."""
    folder = tmp_path / "clone"
    folder.mkdir()
    rows = [to_row(example(city), "train", index) for index, city in enumerate(("Rome", "Oslo"))]
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), folder / "train.parquet")
    pq.write_table(pa.Table.from_pylist(rows[:1], SCHEMA), folder / "test.parquet")
    assert list(read_rows(str(folder))) == rows
    assert len(TaskSet(str(folder))) == 2


@pytest.mark.usefixtures("offline")
def test_an_unavailable_data_set_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no-one/has-this: is no file or folder, and the hub.* Without a network"):
        list(read_rows("no-one/has-this"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: cannot be loaded"):
        list(read_rows(str(tmp_path / "empty")))


def test_values_of_a_csv_file_are_its_texts(tmp_path: Path) -> None:
    """Neither 007 nor 1.50 is a number there, and neither NA nor an empty value is nothing."""
    values = [["007", "1.50"], ["NA", ""], ['a "quote", and', "two\nlines"], ["1e5", "true"]]
    with (tmp_path / "t.csv").open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file).writerows([["problem", "answer"], *values])
    assert list(read_rows(str(tmp_path / "t.csv"))) == [
        {"problem": problem, "answer": answer} for problem, answer in values
    ]


@pytest.mark.parametrize("share", [n / 100 for n in (7, 29, 57, 58)])  # 0.29 * 100 is less than 29
def test_a_share_of_bad_rows_is_allowed_up_to_itself(share: float) -> None:
    report = RowReport("rows", 100)
    report.bad = [DataError("is bad")] * round(share * 100)
    report.check(share)
    report.bad.append(DataError("is bad"))
    with pytest.raises(DataError, match="of 100 rows cannot be used"):
        report.check(share)


def test_a_csv_line_with_too_many_or_too_few_values_is_a_bad_row(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b\n1,2,3\n\n4,5\n6\n")
    many, good, few = read_rows(str(tmp_path / "t.csv"))
    assert (str(many), good, str(few)) == (
        "line 2 has 3 values; expected 2, one per column",
        {"a": "4", "b": "5"},
        "line 5 has 1 values; expected 2, one per column",
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a,a\n1,2\n", "its first line does not name the columns: a, a"),
        (b"", "its first line does not name the columns: it is empty"),
        (b'a\n"never closed', "unexpected end of data"),
        (b"a\n\xff\n", "invalid start byte"),
    ],
)
def test_an_invalid_csv_file_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(DataError, match=rf"t\.csv: cannot be read as csv \(.*{message}"):
        list(read_rows(str(tmp_path / "t.csv")))


@pytest.mark.usefixtures("offline")
def test_files_are_not_read_into_columns(tmp_path: Path) -> None:
    """Columns of one type would add a null for every key of another row, and write mixed values as JSON text."""
    import datasets  # takes seconds, which every collection would

    rows = [{"parameters": {"city": "Rome"}, "answer": 1}, {"parameters": {"days": [2]}, "answer": "one", "more": None}]
    (tmp_path / "t.json").write_text(json.dumps(rows))
    assert list(read_rows(str(tmp_path / "t.json"))) == rows
    (tmp_path / "t.csv").write_text("problem,answer\nWho?,007\nWhere?,NA\n")
    for kind in ("json", "csv"):
        file = str(tmp_path / f"t.{kind}")
        in_columns = list(datasets.load_dataset(kind, data_files=file, split="train", streaming=True))
        assert in_columns != list(read_rows(file))


def test_folders_that_datasets_saved_are_read(tmp_path: Path) -> None:
    import datasets

    rows = [{"a": "007"}, {"a": "NA"}]
    saved = datasets.Dataset.from_list(rows)
    saved.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": saved, "test": saved.select([0])}).save_to_disk(str(tmp_path / "splits"))
    assert list(read_rows(str(tmp_path / "one"))) == list(read_rows(str(tmp_path / "splits"))) == rows


def test_a_machine_without_datasets_reads_files_and_names_the_package_for_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    pq.write_table(pa.Table.from_pylist([{"a": "1"}]), tmp_path / "t.parquet")
    write_jsonl(tmp_path / "t.jsonl", [{"a": "1"}])
    (tmp_path / "t.json").write_text('[{"a": "1"}]')
    (tmp_path / "t.csv").write_text("a\n1\n")
    for kind in ("parquet", "jsonl", "json", "csv"):
        assert list(read_rows(str(tmp_path / f"t.{kind}"))) == [{"a": "1"}]
    for source in (str(tmp_path), "owner/name"):
        with pytest.raises(DataError, match="needs the package datasets, which cannot be imported"):
            list(read_rows(source))


def test_the_same_rows_in_parquet_jsonl_and_json(tmp_path: Path) -> None:
    rows = [to_row(example(city), "train", index) for index, city in enumerate(("Rome", "Oslo"))]
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), tmp_path / "t.parquet")
    write_jsonl(tmp_path / "t.jsonl", rows)
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress((tmp_path / "t.jsonl").read_bytes()))
    (tmp_path / "t.json").write_text(json.dumps(rows))
    for kind in ("parquet", "jsonl", "jsonl.gz", "json"):
        assert list(read_rows(str(tmp_path / f"t.{kind}"))) == rows


def test_other_data_sources_are_not_held_to_toolrls_grammar() -> None:
    other = row(data_source="math", prompt=[{"role": "user", "content": "1+1"}], reward_model={"ground_truth": "2"})
    assert to_task(other, "x").answer == "2"


def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))  # no file may grow beyond 10 kB
    try:
        with pytest.raises(DataError, match=f"cannot store the rows in {tmp_path} .*TMPDIR"):
            RowStore((b"x" * 1000 for _ in range(100)), directory=str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.raises(DataError, match="cannot store the rows in /nowhere"):
        RowStore([b"1"], directory="/nowhere")


def test_row_store_gives_back_what_it_was_given() -> None:
    rows = [{"a": "\ud800 é\n"}, [1, 2.5, None], "x" * 100_000, 7]
    store = RowStore(map(encoded, rows))
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


def test_without_shuffling_rows_come_in_the_order_of_their_file(tmp_path: Path) -> None:
    tasks = tasks_named("a", 5, tmp_path)
    stream = TaskStream([tasks], seed=1, shuffle=False)
    assert ids(stream, 10) == 2 * [task.id for task in tasks]


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


def test_resuming_over_other_files_weights_or_seed_is_refused(tmp_path: Path) -> None:
    sets = [tasks_named("a", 3, tmp_path), tasks_named("b", 3, tmp_path)]
    cursor = TaskStream(sets).cursor
    TaskStream(sets, cursor=TaskCursor(**json.loads(json.dumps(asdict(cursor)))))  # what a checkpoint does
    others: list[tuple[list[TaskSet], dict[str, Any]]] = [
        ([tasks_named("a", 4, tmp_path), sets[1]], {}),
        (sets[::-1], {}),
        (sets, {"seed": 1}),
        (sets, {"weights": [2.0, 1.0]}),
    ]
    for other, changed in others:
        with pytest.raises(DataError, match="differ from those of the saved run"):
            TaskStream(other, cursor=cursor, **changed)


def test_two_equal_files_are_not_shuffled_alike(tmp_path: Path) -> None:
    stream = TaskStream([tasks_named("a", 20, tmp_path), tasks_named("b", 20, tmp_path)])
    drawn = ids(stream, 40)
    numbers = {file: [id.partition("#")[2] for id in drawn if id.startswith(file)] for file in "ab"}
    assert numbers["a"] != numbers["b"]


@pytest.mark.parametrize("weights", ["[1]", "[1,0]", "[1,-2]", "[1,.nan]", "[1e-320,1]", "[x,1]", "3"])
def test_bad_weights_are_a_config_error(weights: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.weights"):
        load_config(["data.train_files=[a,b]", f"data.weights={weights}"])


@pytest.mark.parametrize("seed", ["-1", "x", "1.5", "true"])
def test_a_bad_seed_is_a_config_error(seed: str) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.seed"):
        load_config([f"trainer.seed={seed}"])


def test_toolrls_own_file_is_read_unchanged() -> None:
    """The published test split: 80 rows, and the gold of one calls a tool by half its name."""
    tasks = TaskSet(str(real_data("toolrl", "rlla_test.parquet")))
    assert len(tasks) == 80
    assert [(error.row, error.field) for error in tasks.report.unlisted] == [(9, "reward_model.ground_truth")]
    assert sum("<tool_call>" in task.answer for task in tasks) == 71
