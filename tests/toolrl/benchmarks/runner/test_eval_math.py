r"""Problems with boxed answers: gold is right however it is spelled, with and without Python; faulty rows are known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import real_data
from tests.toolrl.benchmarks.runner.eval_play import category, groups
from tests.toolrl.sandbox.sandbox_host import need_bubblewrap
from toolrl.benchmarks.qa.math import math
from toolrl.benchmarks.runner.benchmark import BenchmarkContext
from toolrl.benchmarks.runner.handlers import env_of
from toolrl.reward_score.math import same_answer
from verl.errors import ConfigError, DataError
from verl.formats.base import build_tool_call_format
from verl.types import Completion, FinishReason, Message, Outcome, StopReason, Task, ToolCall, Trajectory, Turn
from verl.utils.reward_score.base import build_reward

REWARD = build_reward("math")


def total(task: Task, *texts: str) -> float:
    turns = [Turn((), Completion((), (), FinishReason.STOP, 0), Message("assistant", text)) for text in texts]
    return REWARD.score(Trajectory(task, 0, tuple(turns), StopReason.STOP, Outcome.SCORED), task, 0).total


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "file", "rows"),
    [
        ("gsm8k", "gsm8k_test.jsonl", 1319),
        ("math500", "math500.jsonl", 500),
        ("aime24", "aime24.jsonl", 30),
        ("aime25", "aime25.jsonl", 30),
        ("amc23", "amc23.jsonl", 40),
        ("olympiadbench", "olympiadbench.jsonl", 673),
    ],
)
def test_gold_is_right_however_it_is_spelled(name: str, file: str, rows: int) -> None:
    benchmark = math(BenchmarkContext(real_data("math", file).parents[1]))
    tasks = category(benchmark, f"math/{name}").tasks()
    assert len(tasks) == rows
    assert [task.answer for task in category(benchmark, f"math/{name}_python").tasks()] == [t.answer for t in tasks]
    assert sum(total(task, rf"Thus \boxed{{{task.answer}}}.") for task in tasks) == rows
    assert sum(total(task, "") + total(task, task.answer) for task in tasks) == 0
    others = [task.answer.replace(r"\$", "").replace("$", "").replace(r"\frac", r"\dfrac") for task in tasks]
    assert sum(total(task, rf"\boxed{{ {text} }}") for task, text in zip(tasks, others, strict=True)) == rows


@pytest.mark.parametrize(
    ("answer", "gold", "same"),
    [
        (r"8\%", r"$8 \%$", True),
        ("62.5", "62.5%", True),
        ("62.5%", r"62.5\%", True),
        ("6%", "62.5%", False),
        ("%", "5%", False),
        ("n-1", "$n-1$.", True),
    ],
)
def test_signs_around_an_answer_do_not_count(answer: str, gold: str, same: bool) -> None:
    assert same_answer(answer, gold) is same


def small(folder: Path) -> BenchmarkContext:
    (folder / "aime24.jsonl").write_text(json.dumps({"id": "a", "problem": "What is 6 * 7?", "answer": "042"}))
    return BenchmarkContext(folder)


def test_plain_is_one_response_under_any_handler(tmp_path: Path) -> None:
    one = category(math(small(tmp_path)), "math/aime24")
    (task,) = one.tasks()
    assert [message.role for message in task.prompt] == ["system", "user"] and r"\boxed{}" in task.prompt[0].content
    assert env_of(one.episode, "hermes").tool_call_format is None
    assert one.answer_of is not None
    assert [one.answer_of(text) for text in (r"\boxed{7} so \boxed{ 4 2 }", "42")] == ["42", None]
    assert (total(task, r"\boxed{42}"), total(task, r"\boxed{42} \boxed{7}"), total(task, "42")) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("tool_call_format", ["hermes", "toolrl"])
def test_python_is_run_and_the_last_message_answers(tmp_path: Path, tool_call_format: str) -> None:
    need_bubblewrap()
    one = category(math(small(tmp_path)), "math/aime24_python")
    code = build_tool_call_format(tool_call_format).render(
        [ToolCall("python", {"code": r"print(6 * 7, '\\boxed{7}')"})]
    )
    (group,) = groups(one, tool_call_format, lambda _: [code, r"<response> It is \boxed{42}. </response>"])
    (episode,) = group.trajectories
    assert "42" in episode.turns[0].responses[0].content
    assert (episode.num_tool_calls, group.scores[0].total) == (1, 1.0)


HERMES = (build_tool_call_format("hermes").render([ToolCall("python", {"code": "print(6 * 7)"})]),)
ZEROTIR = ("So\n```python", "\nprint(6 * 7)\n```")  # a call takes two turns


@pytest.mark.parametrize(("limit", "calls"), [(None, 4), (1, 1), (0, 0)])
@pytest.mark.parametrize(("tool_call_format", "call"), [("hermes", HERMES), ("zerotir", ZEROTIR)])
def test_the_setting_limits_the_number_of_calls(
    tool_call_format: str, call: tuple[str, ...], limit: int | None, calls: int, tmp_path: Path
) -> None:
    need_bubblewrap()
    one = category(math(replace(small(tmp_path), max_tool_calls=limit)), "math/aime24_python")
    (group,) = groups(one, tool_call_format, lambda _: [*call * calls, r"\boxed{42}"])
    assert (group.trajectories[0].num_tool_calls, group.scores[0].total) == (calls, 1.0)


@pytest.mark.parametrize("piece", [r"\boxed{", "{", "}", "$", "%", r"\boxed{1}", " "])
def test_a_megabyte_does_not_hang(piece: str) -> None:
    text = piece * (1_000_000 // len(piece))
    task = Task("m#0", (), "7", "test")
    assert total(task, text) == total(task, rf"\boxed{{{text}}}") == 0.0


def test_missing_or_wrong_data_are_an_error(tmp_path: Path) -> None:
    one = category(math(BenchmarkContext(tmp_path)), "math/aime24")
    with pytest.raises(
        ConfigError, match=r"aime24.jsonl .* 30 problems of AIME 2024, as rows of {id, problem, answer}"
    ):
        one.tasks()
    for row, field in (({"id": "a", "problem": "p"}, "answer"), ({"id": "a", "problem": "p", "answer": []}, "answer")):
        (tmp_path / "aime24.jsonl").write_text(
            json.dumps({"id": "0", "problem": "p", "answer": "1"}) + "\n" + json.dumps(row)
        )
        with pytest.raises(DataError, match=rf"aime24.jsonl(#|, row )1, field '{field}'"):
            one.tasks()
