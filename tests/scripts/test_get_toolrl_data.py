"""Fetching ToolRL's files, from a small repository made here with a reward of the same interface."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scripts import get_toolrl_data
from scripts.get_toolrl_data import RAW_FILES, TEST_FILES, Published, main
from scripts.raw.rlla import SCHEMA, to_row
from tests.support.programs import need
from tests.verl.data.test_tasks import example

REWARD = """
import os
def compute_score(solution_str, ground_truth, step=0):
    print(solution_str)
    return float(os.getenv("CORRECTMAX1") == "1"), step, len(solution_str), os.environ["EXPERIMENT_NAME"] == "qwen"
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    need("git")
    folder = tmp_path / "ToolRL"
    for published in [*RAW_FILES.values(), *TEST_FILES.values(), Published(get_toolrl_data.REWARD_FILE)]:
        path = folder / published.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("[]")
    (folder / get_toolrl_data.REWARD_FILE).write_text(REWARD)
    rows = pa.Table.from_pylist([to_row(example(), "test", 0)], SCHEMA)
    pq.write_table(rows, folder / "dataset/rlla_4k/test.parquet")
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "-A"], [*author, "commit", "-qm", "all"]):
        subprocess.run(["git", "-C", str(folder), *command], check=True)
    return folder


def run(repository: Path, out: Path) -> int:
    folders = ["--out", str(out / "data"), "--raw", str(out / "raw")]
    return main(["--repository", str(repository), "--commit", "HEAD", *folders])


def test_files_and_reward_cases_are_fetched(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RAW_FILES", "TEST_FILES"):
        unchecked = {key: Published(file.path) for key, file in getattr(get_toolrl_data, name).items()}
        monkeypatch.setattr(get_toolrl_data, name, unchecked)
    monkeypatch.setenv("CORRECTMAX1", "1")  # the user's own choice must not get into the cases
    monkeypatch.chdir(repository.parent)
    assert run(Path(repository.name), tmp_path) == 0
    assert (tmp_path / "raw/rlla_rl.json").exists() and (tmp_path / "data/toolrl/benchmarks/bamboogle.json").exists()
    with gzip.open(tmp_path / "data/parity/reward_cases.json.gz", "rt") as file:
        cases = json.load(file)
    assert len(cases) == 800
    for case in cases:
        is_on = float(case["env"].get("CORRECTMAX1") == "1")
        assert case["want"] == [is_on, case["step"], len(case["solution"]), case["family"] == "qwen"]
    assert "EXPERIMENT_NAME" not in os.environ and os.environ["CORRECTMAX1"] == "1"
    assert any("SCHEDULELENGTH" in case["env"] for case in cases)
    assert capsys.readouterr().out == ""  # the reward's own prints are thrown away


def test_a_file_that_is_not_the_published_one_is_refused(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(repository, tmp_path) == 2
    assert "LICENSE: has SHA-256" in capsys.readouterr().err
    assert not (tmp_path / "data/toolrl/LICENSE").exists()


def test_a_repository_that_cannot_be_reached_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    need("git")
    assert run(tmp_path / "gone", tmp_path) == 2
    assert "git fetch failed" in capsys.readouterr().err
