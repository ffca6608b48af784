"""A person in the policy's place, and the tasks of environments as data files."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.make_env_tasks import main as make_env_tasks
from scripts.play import main, read_message
from tests.conftest import ROOT
from tests.support.episodes import call, respond, run
from tests.toolrl.envs.openenv.test_remote import buy
from verl.data.tasks import TaskSet
from verl.envs.registry import build_env_factory, build_tasks
from verl.types import Message, Score, Task, ToolCall


def played(lines: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/play.py", *arguments]
    text = "".join(f"{line}\n" for line in lines)
    return subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, check=False)


def test_an_episode_is_played_from_a_pipe() -> None:
    wanted = json.loads(build_tasks("shop")[1].answer)
    puts = [f'set_quantity {{"product_id": "{id}", "quantity": {number}}}' for id, number in wanted.items()]
    found = played([*puts, "", "checkout {", "checkout", "I am done."], "shop", "--task", "1")
    assert found.returncode == 0, found.stderr
    assert "done: score 1 (bought 1)" in found.stdout
    assert "cannot read the arguments" in found.stdout and "Please buy" in found.stdout


def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, *arguments: str) -> str:
    """What is shown for one line of input."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(line))
    main(arguments)
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("line", "arguments", "shown"),
    [
        ("steal {}", ["shop"], "Error: there is no function 'steal'"),
        ("steal it", ["shop"], "done: score 0 (bought 0)"),  # this is text
        ("list_products", ["shop"], "quit before the end"),
        ("hello", ["single_turn", "--data", "dataset/mini/test.parquet"], "this environment does not judge"),
        ("", ["shop", "--data", "dataset/mini/test.parquet"], "is not a task of env.name=shop: Field required"),
        ("", ["shop", "--task", "99"], "error: there is no task 99: valid numbers are 0 to 7"),
        (
            "",
            ["remote", "--option", "urls=http://127.0.0.1:1", "--tasks-of", "shop"],
            "error: environment server: not reachable",
        ),
        ("", ["single_turn"], "has no bundled tasks"),
        ("", ["shopp", "--tasks-of", "shop"], "did you mean 'shop'"),
    ],
)
def test_ends_and_errors_are_printed(
    line: str,
    arguments: list[str],
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    assert shown in printed(monkeypatch, capsys, line, *arguments)


def test_lines_become_messages() -> None:
    assert read_message("pay", ["pay"]) == Message("assistant", "pay", (ToolCall("pay", {}),))
    assert read_message('pay {"a": [1]}', ["pay"]).tool_calls == (ToolCall("pay", {"a": [1]}),)
    assert read_message('steal {"a": 1}', ["pay"]).tool_calls == (ToolCall("steal", {"a": 1}),)
    for line in ("paying is fine", "steal", "I pay: {1}"):
        assert read_message(line, ["pay"]).tool_calls == ()
    for wrong in ("pay now", "pay [1]", "steal {1}"):
        with pytest.raises(ValueError):
            read_message(wrong, ["pay"])


def test_tasks_of_an_environment_survive_a_data_file(tmp_path: Path) -> None:
    out = tmp_path / "shop.jsonl"
    assert make_env_tasks(["shop", "--option", "count=5", "--out", str(out)]) == 0
    tasks = build_tasks("shop", {"count": 5})
    read = list(TaskSet(str(out)))
    for number, (task, found) in enumerate(zip(tasks, read, strict=True)):
        assert found == replace(task, id=f"shop.jsonl#{number}", extra={**task.extra, "id": task.id})
        score = run(build_env_factory("shop"), found, *buy(found)).score
        assert score is not None and score.total == 1.0


def test_the_environment_of_the_documentation_works(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    (tmp_path / "guess.py").write_text(text.partition("```python\n")[2].partition("```")[0], encoding="utf-8")
    task = Task("t", (Message("user", "Find it."),), "42", "guess")
    factory = build_env_factory(f"{tmp_path}/guess.py:GuessEnv")
    results = run(factory, task, call("guess", number=50), call("guess"), call("guess", number=42), respond())
    assert [result.messages[0].content for result in results[:3]] == [
        "lower",
        "Error: number must be an integer",
        "right",
    ]
    assert results.score == Score(1.0, {"right": 1.0})
