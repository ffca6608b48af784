"""Python objects as settings: arguments round-trip, callables travel, rows become files."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.verl.scoring.test_scoring import scores
from toolrl import rewards
from toolrl.api.inputs import Objects, argument, data_files, model_path
from verl.config.commands import TRAIN
from verl.config.load import load_config
from verl.data.source import source_rows
from verl.envs.tools.function import FunctionTool
from verl.errors import ConfigError, DataError
from verl.registry import resolve
from verl.scoring.pool import ScoringPool
from verl.types import Score

ODD = st.sampled_from(["'", "\\'", "a\\", "null", "5", "~/x", "a\nb", "[x]"])
TEXT = ODD | st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="$"), max_size=8)
PLAIN = TEXT | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False, allow_infinity=False)
NAMES = st.from_regex("a[a-z_]{0,7}", fullmatch=True)
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3))


@pytest.mark.long
@given(VALUES)
@settings(deadline=None, max_examples=200)
def test_a_value_comes_back_from_its_argument(value: Any) -> None:
    arguments = [argument("env.options", {"value": value}), "env.name=a:b", "env.tool_call_format=hermes"]
    config = load_config(arguments, TRAIN)
    assert config.env.options["value"] == value and type(config.env.options["value"]) is type(value)


def test_a_value_without_a_form_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"rollout.n: an object of type set is neither a text, a number"):
        argument("rollout.n", {1})


def weather(city: str) -> str:
    """The weather."""
    return city


def test_callables_get_names_and_nothing_else_does(tmp_path: Path) -> None:
    objects = Objects(tmp_path / "objects.pkl")
    twice = lambda value: 2 * value  # noqa: E731
    tool, half = FunctionTool(weather, "forecast"), lambda value: value / 2
    found = objects.name(
        {"a": [weather, "x", 1], "b": {"name": twice, "weight": 0.5}, "c": tool, "d": weather, "e": half}
    )
    file = str(tmp_path / "objects.pkl")
    assert found == {
        "a": [f"{file}:weather", "x", 1],
        "b": {"name": f"{file}:function", "weight": 0.5},
        "c": f"{file}:FunctionTool",
        "d": f"{file}:weather",
        "e": f"{file}:function_2",
    }
    objects.write()
    assert resolve("object", found["b"]["name"], {})(4) == 8 and resolve("object", found["e"], {})(4) == 2
    again = resolve("tool", found["c"], {})
    assert again.spec == tool.spec and again("Oslo") == "Oslo"
    with pytest.raises(ConfigError, match="has no 'weathr'; did you mean 'weather'"):
        resolve("object", f"{file}:weathr", {})


def test_an_unpicklable_object_is_named(tmp_path: Path) -> None:
    lock, objects = threading.Lock(), Objects(tmp_path / "objects.pkl")
    objects.name({"reward.name": lambda response, answer: lock.locked(), "env.tools": [weather]})
    with pytest.raises(ConfigError, match=r"^function cannot be sent to other processes"):
        objects.write()
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "objects.pkl").write_bytes(b"no pickle")
    with pytest.raises(ConfigError, match=r"reward: cannot import file .*objects\.pkl"):
        resolve("reward", f"{tmp_path / 'objects.pkl'}:score", {})
    with pytest.raises(ConfigError, match="there is no file"):
        resolve("reward", f"{tmp_path / 'gone.pkl'}:score", {})


def test_functions_of_a_script_are_sent_whole(tmp_path: Path) -> None:
    """Another process has neither the script's functions nor its globals."""
    script = tmp_path / "notebook.py"
    script.write_text(f"""
from pathlib import Path
from toolrl.api.inputs import Objects
BONUS = 5
class Env:
    def reset(self): return helper(1)
def helper(value): return value + BONUS
objects = Objects(Path({str(tmp_path / "objects.pkl")!r}))
print(objects.name(Env), objects.name(lambda: Env().reset()))
objects.write()
""")
    names = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True).stdout.split()
    assert resolve("environment", names[0], {})().reset() == 6
    assert resolve("reward", names[1], {})() == 6


@pytest.mark.long
def test_a_function_scores_in_the_processes_of_the_pool(tmp_path: Path) -> None:
    objects = Objects(tmp_path / "objects.pkl")
    name = objects.name(lambda response, answer: {"score": 0.5, "length": len(response)})
    objects.write()
    with ScoringPool(name, {}, 1) as pool:
        (found,) = scores(pool, "abc")
    assert isinstance(found, Score) and (found.total, found.parts["length"]) == (0.5, 3.0)


def written(argument: str, data: Any, path: Path) -> list[str]:
    files, write = data_files(argument, data, path)
    write()
    return files


def test_rows_become_a_file(tmp_path: Path) -> None:
    rows = [{"prompt": "ä", "n": 1}, {"prompt": "b", "n": None}]
    for data in (rows, tuple(rows), (row for row in rows)):
        (file,) = written("data", data, tmp_path / "train")
        assert [json.loads(line) for line in Path(file).read_text().splitlines()] == rows


def test_data_sets_keep_their_fill_values_apart(tmp_path: Path) -> None:
    """In Arrow a null may mean that the field is absent."""
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": None}]},
    ]
    table = Dataset.from_list(rows)
    for data in (table, table.to_iterable_dataset()):
        (file,) = written("data", data, tmp_path / "train")
        assert file.endswith("train.parquet")
        second = list(source_rows(file))[1][0]
        assert second["messages"][1] == {"role": "assistant", "content": "b"}


def test_files_stay_files() -> None:
    path = Path("unused")
    assert written("data", "owner/name:train", path) == ["owner/name:train"]
    assert written("data", ["a.jsonl", Path("b.jsonl")], path) == ["a.jsonl", "b.jsonl"]
    assert written("data", "embedded:train.parquet", path) == ["embedded:train.parquet"]
    assert written("data", "~/a.jsonl", path) == [str(Path("~/a.jsonl").expanduser())]
    assert model_path("embedded") == "embedded:model" and model_path("owner/model") == "owner/model"


def test_other_data_is_an_error(tmp_path: Path) -> None:
    for data, problem in (
        ({"prompt": "a"}, "not an object of type dict"),
        (5, "not an object of type int"),
        ([], "val_data: is empty"),
        (Dataset.from_list([]), "val_data: is empty"),
        ([{"a": 1}, 5], "val_data, row 1: is of type int; expected a dict"),
        ([{"a": {1}}], "cannot be written as JSON"),
    ):
        with pytest.raises((ConfigError, DataError), match=problem):
            written("val_data", data, tmp_path / "train")


def test_builtin_rewards_are_attributes() -> None:
    assert rewards.rlla == "rlla" and "calls" in dir(rewards)
    with pytest.raises(AttributeError, match="no reward 'call'; did you mean 'calls'"):
        _ = rewards.call
    assert pickle.loads(pickle.dumps("rlla")) == rewards.rlla
