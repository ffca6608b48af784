"""tau2: gold actions and texts are right in every task, doing nothing only where nothing was to be done."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import real_data
from tests.toolrl.benchmarks.runner.eval_play import category, foretold, groups, scores
from toolrl.benchmarks.runner.benchmark import BenchmarkContext
from toolrl.benchmarks.tau2.benchmark import tau2
from verl.errors import ConfigError, DataError
from verl.formats.base import build_tool_call_format
from verl.types import Task, ToolCall


def gold(task: Task) -> list[str]:
    """All gold actions in one message, then what must be communicated."""
    wanted = json.loads(task.answer)
    made = [ToolCall(**action) for action in wanted["actions"]]
    text = "Done: " + "; ".join(wanted["communicate"])
    return [build_tool_call_format("hermes").render(made), text] if made else [text]


@pytest.mark.parametrize(("domain", "rows", "idle"), [("retail", 40, 2), ("airline", 20, 7)])
def test_gold_conversations_are_right(domain: str, rows: int, idle: int) -> None:
    one = category(tau2(BenchmarkContext(real_data("tau2", domain, "tasks.json").parents[2])), f"tau2/{domain}")
    tasks = one.tasks()
    assert len(tasks) == rows
    assert [score.total for score in scores(one, "hermes", gold, tasks)] == [1.0] * rows
    assert foretold(one, "hermes", tasks[:2])
    nothing_to_do = scores(one, "hermes", lambda _: ["I am sorry."], tasks)
    assert sum(score.total for score in nothing_to_do) == idle


@pytest.mark.long
def test_notes_name_the_user() -> None:
    folder = real_data("tau2", "retail", "tasks.json").parents[2]
    assert "not comparable" in tau2(BenchmarkContext(folder)).notes[0]
    chat = {"user": "chat", "user_url": "http://127.0.0.1:1/v1", "user_model": "big"}
    benchmark = tau2(BenchmarkContext(folder, user=chat))
    assert "the user is big" in benchmark.notes[0]
    few = benchmark.categories[0].tasks()[:1]
    assert few[0].data_source == "tau2_retail_chat_user"
    (group,) = groups(benchmark.categories[0], "hermes", gold, few)  # no server listens there
    assert group.scores == () and "simulated user" in group.faults[0]


def copied(folder: Path, **changed: Any) -> BenchmarkContext:
    """Retail's data with other fields in its second task of the test split."""
    shutil.copytree(real_data("tau2", "retail"), folder / "retail")
    rows = json.loads((folder / "retail" / "tasks.json").read_text())
    chosen = json.loads((folder / "retail" / "split_tasks.json").read_text())["test"]
    row = next(row for row in rows if row["id"] == chosen[1])
    for name, value in changed.items():
        row.pop(name) if value is None else row.update({name: value})
    (folder / "retail" / "tasks.json").write_text(json.dumps(rows))
    return BenchmarkContext(folder)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"evaluation_criteria": None}, r"row \d+, field 'evaluation_criteria': is missing"),
        ({"user_scenario": {"instructions": {}}}, r"row \d+, field 'reason_for_call': is missing"),
        ({"user_scenario": "be nice"}, r"row \d+: is not a task"),
        ({"id": None}, r"tasks.json or split_tasks.json cannot be read"),
        ({"id": 12345}, r"retail: tasks.json or split_tasks.json .*there is no task '\d+', which split 'test' names"),
    ],
)
def test_a_task_that_cannot_be_used_is_named(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        tau2(copied(tmp_path, **changed)).categories[0].tasks()


def test_missing_data_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tasks.json .* data/tau2/domains of tau2-bench's repository"):
        tau2(BenchmarkContext(tmp_path))
    with pytest.raises(ConfigError, match=r"no file .*airline"):
        tau2(copied(tmp_path)).categories[1].tasks()
