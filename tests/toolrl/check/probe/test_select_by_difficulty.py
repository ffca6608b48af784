"""Filtering a data set by what a probe has seen: which rows stay, and in what form."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from scripts.limr import learning_impact
from scripts.select_by_difficulty import main
from tests.support.tiny import MINI
from tests.toolrl.papers.test_recipe_rewards import episode
from verl.data.rows import read_rows
from verl.data.tasks import TaskSet, to_task
from verl.errors import DataError
from verl.text import prompt_sha256
from verl.tracking.transcripts import Transcripts
from verl.types import Score, TrajectoryGroup

RATES = [0.0, 0.2, 0.5, 0.75, 0.8, 1.0, 1.0]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """As many rows as RATES, and one that is not probed."""
    rows = [row for row, _ in zip(read_rows(str(MINI / "test.parquet")), range(len(RATES) + 1), strict=False)]
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_probe(data: Path, rates: list[float], **changed: Any) -> Path:
    path = data.with_name("probe.jsonl")
    lines = []
    for number, (row, rate) in enumerate(zip(read_rows(str(data)), rates, strict=False)):
        digest = prompt_sha256(to_task(row, "").prompt)
        line = {"task_id": f"{data.name}#{number}", "success_rate": rate, "prompt_sha256": digest}
        lines.append(json.dumps(line | changed))
    path.write_text("\n".join(lines) + "\n")
    return path


def run(data: Path, *argv: str, expected: int = 0) -> list[int]:
    """The numbers, in the data, of the rows that are kept."""
    probe, out = data.with_name("probe.jsonl"), data.with_name(f"kept{data.suffix}")
    assert main([str(probe), "--data", str(data), "--out", str(out), *argv]) == expected
    if expected:
        assert not out.exists()
        return []
    rows = list(read_rows(str(data)))
    return [rows.index(row) for row in read_rows(str(out))]


@pytest.mark.parametrize(
    ("argv", "kept"),
    [
        ([], [1, 2, 3, 4]),
        (["--inclusive"], [0, 1, 2, 3, 4, 5, 6]),
        (["--least", "0.2", "--most", "0.8"], [2, 3]),
        (["--least", "0.2", "--most", "0.8", "--inclusive"], [1, 2, 3, 4]),
        (["--most", "0.5"], [1]),
    ],
)
def test_a_window_keeps_what_lies_in_it(data: Path, argv: list[str], kept: list[int]) -> None:
    write_probe(data, RATES)
    assert run(data, *argv) == kept


def test_rows_are_chosen_whatever_reward_they_name(data: Path) -> None:
    """The probe was given it; here nothing of it is looked up."""
    write_probe(data, RATES)
    own = [{**row, "reward": "mine.py:score"} for row in read_rows(str(data))]
    data.write_text("".join(json.dumps(row) + "\n" for row in own))
    assert run(data) == [1, 2, 3, 4]


def test_balance_keeps_as_many_hard_rows_as_easy_ones(data: Path) -> None:
    write_probe(data, [0.1, 0.3, 0.4, 0.5, 0.9, 0.6, 0.2])
    kept = run(data, "--balanced")
    hard, easy = {0, 1, 2, 6} & {*kept}, {4, 5} & {*kept}
    assert len(hard) == len(easy) == 2
    assert 3 in kept
    assert len(kept) == 5
    assert run(data, "--balanced") == kept
    assert any(run(data, "--balanced", "--seed", str(seed)) != kept for seed in range(1, 6))


def test_the_reason_for_dropped_rows_is_printed(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_probe(data, RATES)
    run(data, "--most", "0.6")
    output = " ".join(capsys.readouterr().err.split())
    for what in ("dropped: never right │ 1", "always right │ 2", "outside the window │ 2", "not probed │ 1"):
        assert what in output


def test_parquet_keeps_its_schema_and_can_be_trained_on(tmp_path: Path) -> None:
    data = tmp_path / "test.parquet"
    data.write_bytes((MINI / "test.parquet").read_bytes())
    write_probe(data, [0.0, 0.5, 1.0, 0.25])
    assert run(data) == [1, 3]
    out = tmp_path / "kept.parquet"
    assert pq.read_schema(out).equals(pq.read_schema(data), check_metadata=True)
    assert [task.answer for task in TaskSet(str(out))] == [TaskSet(str(data))[number].answer for number in (1, 3)]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"task_id": "other.jsonl#0"}, "is of other.jsonl, not of tasks.jsonl"),
        ({"task_id": "no number"}, "is not a probe result"),
        ({"success_rate": None}, "is not a probe result"),
        ({"prompt_sha256": "0" * 16, "success_rate": 0.5}, "is not the row that was probed"),
        ({"success_rate": 0.0}, "no row would be kept: 7 never right"),
    ],
)
def test_a_probe_of_other_data_is_refused(
    data: Path, changed: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_probe(data, RATES, **changed)
    run(data, expected=2)
    assert message in capsys.readouterr().err


def test_a_batch_of_which_no_row_is_kept_is_no_obstacle(tmp_path: Path) -> None:
    data = tmp_path / "tasks.parquet"
    pq.write_table(pq.read_table(MINI / "train.parquet").slice(0, 1100), data)
    write_probe(data, [0.5, 1.0])  # the second and third batch of 512 have none
    assert run(data) == [0]


def test_the_data_are_not_written_over(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, probe = data.read_text(), write_probe(data, RATES)
    assert main([str(probe), "--data", str(data), "--out", str(data)]) == 2
    assert "would be overwritten" in " ".join(capsys.readouterr().err.split()) and data.read_text() == before


@pytest.mark.parametrize("out", ["kept.parquet", "kept.json", "kept"])
def test_the_output_is_of_the_same_kind(data: Path, out: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [str(write_probe(data, RATES)), "--data", str(data), "--out", str(data.with_name(out))]
    assert main(argv) == 2
    assert "expected .parquet or .jsonl for both" in capsys.readouterr().err
    assert not data.with_name(out).exists()


COURSES = {0: [0.0, 1.0], 1: [0.5, 0.5], 2: [0.0, 0.0], 3: [1.0, 1.0], 4: [0.0]}  # row -> success rates by epoch


def write_run(data: Path, part: str = "correct") -> Path:
    """The transcripts of two epochs, two rows a step and two rollouts a row; row 4 was seen once."""
    transcripts, rows = Transcripts(data.parent / "run"), list(read_rows(str(data)))
    seen = dict.fromkeys(COURSES, 0)
    for step, chosen in enumerate([(0, 1), (2, 3), (4, 0), (1, 2), (3,)], 1):
        groups = []
        for row in chosen:
            rate = COURSES[row][seen[row]]
            seen[row] += 1
            asked = to_task(rows[row], f"{data.name}#{row}")
            right = [float(index < 2 * rate) for index in range(2)]
            scores = tuple(Score(4 * each - 3, {part: each}) for each in right)
            groups.append(TrajectoryGroup(asked, (episode(asked, "a"), episode(asked, "b")), scores, (0.0, 0.0)))
        other = replace(asked, id="other.jsonl#0")
        groups.append(TrajectoryGroup(other, (episode(other, "a"),), (Score(0.0, {}),), (0.0,)))
        transcripts.write(step, groups)
    return data.parent / "run"


def test_learning_impact_by_hand() -> None:
    """Means (1/6, 1/2), so that the most there can be is (5/6)^2 + (1/2)^2 = 34/36; of row 0, (1/6)^2 + (1/2)^2."""
    courses = {0: [0.0, 1.0], 1: [0.5, 0.5], 2: [0.0, 0.0, 0.7], 3: [0.9]}
    assert learning_impact(courses, 2) == pytest.approx({0: 24 / 34, 1: 30 / 34, 2: 24 / 34})
    assert learning_impact({0: [1.0], 1: [0.5]}, 1) == pytest.approx({0: 0.0, 1: 0.0})
    with pytest.raises(DataError, match="always right"):
        learning_impact({0: [1.0, 1.0]}, 2)


def test_rows_that_follow_the_mean_course_are_kept(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows 0 to 3 have two epochs: means 3/8 and 5/8, at most 25/64 + 9/64 = 34/64."""
    out = data.with_name("kept.jsonl")
    argv = [str(write_run(data)), "--data", str(data), "--out", str(out)]
    assert main([*argv, "--impact", "0.3"]) == 0
    rows = list(read_rows(str(data)))
    # 1 - (9 + 9)/34 = 8/17; 1 - (1 + 1)/34 = 16/17; row 2: 1 - (9 + 25)/34 = 0; row 3: 1 - (25 + 9)/34 = 0
    assert [rows.index(row) for row in read_rows(str(out))] == [0, 1]
    output = " ".join(capsys.readouterr().err.split())
    assert "impact below 0.3 │ 2" in output and "fewer than 2 epochs │ 1" in output and "not trained on │ 3" in output
    assert main([*argv, "--impact", "0.5"]) == 0 and len(list(read_rows(str(out)))) == 1
    assert main([*argv, "--impact", "0.95"]) == 2 and "Lower --impact" in capsys.readouterr().err


def test_the_score_of_a_right_answer_is_required(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = data.with_name("kept.jsonl")
    argv = [str(write_run(data, "format")), "--data", str(data), "--out", str(out), "--impact", "0.3"]
    assert main(argv) == 2
    assert "has no record of correctness (parts: format)" in " ".join(capsys.readouterr().err.split())
    assert main([*argv, "--right-at", "1"]) == 0 and len(list(read_rows(str(out)))) == 2
    assert main([str(data.parent), *argv[1:]]) == 2 and "has no transcripts" in capsys.readouterr().err
    for more in (["--least", "0.1"], ["--balanced"]):
        with pytest.raises(SystemExit):
            main([*argv, *more])
    with pytest.raises(SystemExit):
        main([*argv[:-2], "--right-at", "1"])
