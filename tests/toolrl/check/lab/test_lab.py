"""The reward lab finds what it should, and its exit code shows it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from scripts.raw.rlla import dialogue, to_row
from tests.conftest import ROOT, real_data
from tests.support.tiny import save_tiny_model
from tests.toolrl.check.lab.lab import try_reward
from tests.verl.data.test_tasks import example, row, write_jsonl
from toolrl.check.lab.__main__ import GOLD, LabReward, main
from verl.data.tasks import to_task
from verl.formats.toolrl_text import render_response
from verl.types import Score, Task, Trajectory
from verl.utils.reward_score import Mutation, build_reward
from verl.utils.reward_score.rlla import RllaReward

CALL_TASK = to_task(row(), "call")
RESPONSE_TASK = to_task(
    to_row(
        example() | {"input": dialogue(["<user> hi </user>"]), "output": render_response("t", None, "hello")}, "t", 0
    ),
    "response",
)
TWO_CALLS = [
    {"name": "get_weather", "parameters": {"a": 1e17, "b": True}},
    {"name": "get_time", "parameters": {"c": "x"}},
]
TWO_CALLS_TASK = to_task(to_row(example() | {"output": render_response("t", TWO_CALLS)}, "t", 0), "two calls")
ASKED_FOR = {
    "no-op",
    "think only",
    "malformed JSON",
    "wrong name",
    "dropped parameter",
    "wrong value",
    "duplicated call",
    "over-calling",
    "copied tool list",
    "empty text",
}


@pytest.mark.parametrize("toggle", ["", "refined", "intermediate", "coarse", "schedule_reward", "with_length"])
def test_gold_scores_the_maximum_and_every_spoiled_call_less(toggle: str) -> None:
    reward = RllaReward(**{toggle: True}) if toggle else RllaReward()
    report = try_reward(reward, [CALL_TASK, TWO_CALLS_TASK])
    assert report.violations == []
    assert report.stats.keys() >= ASKED_FOR | {GOLD, "missing call", "tool_call unclosed"}


def test_a_call_inside_a_response_is_ToolRLs_own_hole_and_the_penalty_closes_it() -> None:  # noqa: N802
    report = try_reward(RllaReward(), [RESPONSE_TASK])
    assert [violation.response_kind for violation in report.violations] == ["call inside response"]
    assert try_reward(RllaReward(unwanted_call_penalty=0.5), [RESPONSE_TASK]).violations == []


class Careless:
    """Rewards any response that is not empty."""

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        return Score(float(bool(trajectory.response)), {})

    def maximum(self, task: Task, step: int) -> float:
        return 1.0

    def gold(self, task: Task, step: int) -> str:
        return task.answer

    def mutations(self, task: Task, step: int) -> list[Mutation]:
        return [Mutation("empty", ""), Mutation("nonsense", "nonsense")]


class Overpaying(Careless):
    """Pays a spoiled response more than the gold one, whose score is no number."""

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        return Score(float("nan") if trajectory.response == task.answer else 5.0, {})


class Failing(Careless):
    def gold(self, task: Task, step: int) -> str:
        raise RuntimeError("no gold today")


class FromStepThree(Careless):
    """Careful from step 3 on."""

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        return Score(float(trajectory.response == task.answer or (step < 3 and bool(trajectory.response))), {})


def test_scores_above_the_maximum_or_not_finite_are_violations() -> None:
    violations = try_reward(Overpaying(), [CALL_TASK]).violations
    assert [str(violation) for violation in violations] == [
        "call: gold scores nan, expected exactly 1",
        "call: empty scores 5, expected less than 1",
        "call: nonsense scores 5, expected less than 1",
    ]


def test_an_upside_down_range_is_found() -> None:
    """ToolRL's equal maximum under its unclamped schedule pays wrong calls more from step 300 on."""
    reward = RllaReward(correct_max_1=True, schedule_reward=True)
    assert try_reward(reward, [CALL_TASK], 200).violations == []
    assert try_reward(reward, [CALL_TASK], 400).violations


def test_the_step_reaches_the_reward(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [row()])
    codes = [main([f"data={path}", f"reward.name={__name__}:FromStepThree", f"--step={step}"]) for step in ("2", "3")]
    assert codes == [1, 0]


def count_letters(response: str, answer: str) -> float:
    return float(len(response))


def test_a_reward_of_ones_own_is_tried_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [row(), row()])
    assert isinstance(Careless(), LabReward)
    assert main([f"data={path}", "reward.name=tests.toolrl.check.lab.test_lab:Careless", "--show=1"]) == 1
    output = capsys.readouterr().out
    assert "t.jsonl#0: nonsense scores 1, expected less than 1" in output and "and 1 more" in output
    assert "2 rows tried, 2 with violations" in output
    assert main([f"data={path}", f"reward.name={__file__}:Careless", "eval.limit=1"]) == 1
    assert "1 rows tried, 1 with violations" in capsys.readouterr().out


def test_a_plain_function_is_a_reward_but_has_nothing_to_try(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from toolrl.check.lab.__main__ import as_trajectory

    reward = build_reward("tests.toolrl.check.lab.test_lab:count_letters")
    assert reward.score(as_trajectory(CALL_TASK, "four"), CALL_TASK, 0) == Score(4.0, {})
    path = write_jsonl(tmp_path / "t.jsonl", [row()])
    assert main([f"data={path}", "reward.name=tests.toolrl.check.lab.test_lab:count_letters"]) == 2
    assert "does not define maximum(), gold() and mutations()" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reward.name=rla"], "unknown reward 'rla'; did you mean 'rlla'?"),
        (["reward.name=tests.toolrl.check.lab.test_lab:Carless"], "did you mean 'Careless'?"),
        (["reward.name=nowhere:Thing"], "cannot import module 'nowhere'"),
        (["reward.name=gone.py:Thing"], "there is no file 'gone.py'"),
        (["reward.options.coarse=maybe"], "must be of type bool"),
        (["reward.options.coars=true"], "did you mean 'coarse'?"),
        (["reward.options.environ=5"], "has no option 'environ'"),
        (["reward.name=tests.toolrl.check.lab.test_lab:Failing"], "fails on t.jsonl#0 (RuntimeError: no gold today)"),
        (
            ["reward.name=tests.toolrl.check.lab.test_lab:Careless", "reward.options.a=1"],
            "has no option 'a'; its options are none",
        ),
        (
            ["reward.name=tests.toolrl.check.lab.test_lab:CALL_TASK"],
            "must be a class or a function, not an object of Task",
        ),
        (["reward.name=':X'"], "unknown reward ':X'"),
        (["data=gone.parquet"], "there is no file 'gone.parquet'"),
    ],
)
def test_unusable_input_is_one_clear_error(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [row()])
    assert main([f"data={path}", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("eval.limit=-5", "eval.limit must be at least 1"),
        ("--step=-5", "is not a whole number"),
        ("--show=x", "is not a whole number"),
        ("--limit=5", "unknown option"),
        ("rollout.n=5", "`lab` does not use rollout"),
    ],
)
def test_numbers_and_names_are_checked(
    word: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"data={write_jsonl(tmp_path / 't.jsonl', [row()])}", word]) == 2
    assert message in capsys.readouterr().out


def test_rows_with_gold_turns_need_no_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in training, where the format is found by the model."""
    question = {"role": "user", "content": "Rain in Oslo?"}
    call = {"type": "function", "function": {"name": "rain", "arguments": '{"city": "Oslo"}'}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    rain = {
        "type": "function",
        "function": {"name": "rain", "parameters": {"properties": {"city": {"type": "string"}}}},
    }
    path = write_jsonl(tmp_path / "t.jsonl", [{"messages": [question, turn], "tools": [rain]}])
    for overrides in ([], ["env.tool_call_format=hermes"], ["reward.name=calls"], ["model=embedded"]):
        assert main([f"data={path}", *overrides]) == 0
    assert main([f"data={path}", "env.tool_call_format=native"]) == 2
    assert "native needs model=PATH" in capsys.readouterr().out


def test_rows_that_cannot_be_read_offend_and_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = [row(prompt=[])] * 30
    assert main(["data=" + write_jsonl(tmp_path / "t.jsonl", [row(), *bad]), "--show=25"]) == 1
    output = capsys.readouterr()
    assert output.out.count("unusable: ") == 25 and "and 5 more (--show=30 lists all)" in output.out and not output.err
    assert main(["data=" + write_jsonl(tmp_path / "t.jsonl", [row()])]) == 0


@pytest.mark.long
@pytest.mark.parametrize("name", ["train", "test", "test_new_tools"])
def test_the_embedded_data_have_no_offending_row(name: str) -> None:
    path = str(ROOT / f"dataset/mini/{name}.parquet")
    assert main([f"data={path}", "reward.options.unwanted_call_penalty=1"]) == 0


def test_toolrls_test_rows_offend_by_their_known_faults_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Row 9 calls a tool by half its name; the nine response rows let a call hide in the response."""
    assert main(["data=" + str(real_data("toolrl", "rlla_test.parquet"))]) == 1
    output = capsys.readouterr().out
    assert "80 rows tried, 9 with violations; 0 rows unusable, 1 call unlisted tools" in output
    assert output.count("call inside response scores 1, expected less than 1") == 9


def test_with_a_model_responses_go_through_its_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that stops at `</think>` can write no gold response, which its text alone does not show."""
    model, data = save_tiny_model(tmp_path / "model"), str(ROOT / "dataset/mini/test.parquet")
    assert main([f"data={data}", "eval.limit=5", f"model={model}"]) == 0
    stop = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids("</think>")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, stop]}))
    assert main([f"data={data}", "eval.limit=5"]) == 0
    assert main([f"data={data}", "eval.limit=5", f"model={model}"]) == 1
    assert "5 rows tried, 5 with violations" in capsys.readouterr().out
