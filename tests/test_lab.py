"""The reward lab finds what it should, and its exit code says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ROOT, real_data
from tests.test_tasks import example, row, write_jsonl
from verl.data.rlla import dialogue, to_row
from verl.data.tasks import to_task
from verl.types import Score, Task, Trajectory
from verl.utils.reward_score import Mutation, build_reward
from verl.utils.reward_score.lab import GOLD, LabReward, main, try_reward
from verl.utils.reward_score.parsing import render_reply
from verl.utils.reward_score.rlla import RllaOptions, RllaReward

CALL_TASK = to_task(row(), "call")
RESPONSE_TASK = to_task(
    to_row(example() | {"input": dialogue(["<user> hi </user>"]), "output": render_reply("t", None, "hello")}, "t", 0),
    "response",
)
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
    options = RllaOptions(**{toggle: True}) if toggle else RllaOptions()
    report = try_reward(RllaReward(options), [CALL_TASK])
    assert report.offences == []
    assert report.scores.keys() >= ASKED_FOR | {GOLD}


def test_a_call_inside_a_response_is_ToolRLs_own_hole_and_the_penalty_closes_it() -> None:  # noqa: N802
    report = try_reward(RllaReward(RllaOptions()), [RESPONSE_TASK])
    assert [offence.reply_kind for offence in report.offences] == ["call inside response"]
    assert try_reward(RllaReward(RllaOptions(unwanted_call_penalty=0.5)), [RESPONSE_TASK]).offences == []


class Careless:
    """Rewards any reply that is not empty."""

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        return Score(float(bool(trajectory.reply)), {})

    def maximum(self, task: Task, step: int) -> float:
        return 1.0

    def gold(self, task: Task, step: int) -> str:
        return task.answer

    def mutations(self, task: Task, step: int) -> list[Mutation]:
        return [Mutation("empty", ""), Mutation("nonsense", "nonsense")]


def count_letters(reply: str, answer: str) -> float:
    return float(len(reply))


def test_a_reward_of_ones_own_is_tried_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [row(), row()])
    assert isinstance(Careless(), LabReward)
    assert main(["--data", path, "--reward", "tests.test_lab:Careless", "--show", "1"]) == 1
    said = capsys.readouterr().out
    assert "t.jsonl#0: nonsense scores the maximum: 1 of 1" in said and "and 1 more" in said
    assert "2 rows tried, 2 with offences" in said
    assert main(["--data", path, "--reward", f"{__file__}:Careless", "--limit", "1"]) == 1


def test_a_plain_function_is_a_reward_but_has_nothing_to_try(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from verl.utils.reward_score.lab import as_trajectory

    reward = build_reward("tests.test_lab:count_letters")
    assert reward.score(as_trajectory(CALL_TASK, "four"), CALL_TASK, 0) == Score(4.0, {"score": 4.0})
    path = write_jsonl(tmp_path / "t.jsonl", [row()])
    assert main(["--data", path, "--reward", "tests.test_lab:count_letters"]) == 2
    assert "brings no maximum(), gold() and mutations()" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--reward", "rla"], "unknown reward 'rla'; did you mean 'rlla'?"),
        (["--reward", "tests.test_lab:Carless"], "did you mean 'Careless'?"),
        (["--reward", "nowhere:Thing"], "cannot import module 'nowhere'"),
        (["--reward", "gone.py:Thing"], "there is no file 'gone.py'"),
        (["--option", "coarse=maybe"], "must be true or false"),
        (["--option", "coars=true"], "did you mean 'coarse'?"),
        (["--data", "gone.parquet"], "there is no such file"),
    ],
)
def test_what_cannot_be_used_is_one_clear_error(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [row()])
    assert main(["--data", path, *arguments]) == 2
    assert said in " ".join(capsys.readouterr().out.split())


def test_rows_that_cannot_be_read_offend(tmp_path: Path) -> None:
    assert main(["--data", write_jsonl(tmp_path / "t.jsonl", [row(), row(prompt=[])])]) == 1
    assert main(["--data", write_jsonl(tmp_path / "t.jsonl", [row()])]) == 0


@pytest.mark.parametrize("name", ["train", "test", "test_new_tools"])
def test_the_embedded_data_have_no_offending_row(name: str) -> None:
    path = str(ROOT / f"dataset/mini/{name}.parquet")
    assert main(["--data", path, "--option", "unwanted_call_penalty=1"]) == 0


def test_toolrls_test_rows_offend_by_their_known_faults_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Row 9 calls a tool by half its name; the nine response rows let a call hide in the response."""
    assert main(["--data", str(real_data("toolrl", "rlla_test.parquet"))]) == 1
    said = capsys.readouterr().out
    assert "79 rows tried, 9 with offences; 1 rows unreadable" in said
    assert said.count("call inside response scores the maximum: 1 of 1") == 9
