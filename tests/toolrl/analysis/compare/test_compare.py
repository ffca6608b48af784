"""Runs compared over rows and seeds: the statistics, the arms, and what cannot be compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from toolrl.analysis.compare.__main__ import main
from toolrl.analysis.compare.arms import arms_of, compare, last_common_step
from toolrl.analysis.compare.paired import Difference, difference, holm
from toolrl.analysis.report.folder import read_runs
from verl.config.commands import TRAIN
from verl.config.load import load_config
from verl.errors import ConfigError
from verl.tracking.jsonl import write_jsonl
from verl.trainer.records import write_records


def scores(values: list[float]) -> dict[str, float]:
    return {str(row): value for row, value in enumerate(values)}


def test_equal_runs_do_not_differ() -> None:
    runs = [scores([1.0, 2.0]), scores([0.0, 2.0])]
    found = difference(runs, runs)
    assert (found.mean, found.p) == (0.0, 1.0)


def test_two_rows_and_two_seeds_by_hand() -> None:
    """Differences 1, 3 and 2, 4: means over seeds 2 and 3, over rows 1.5 and 3.5; errors 0.5 and 1; df 25 / 17."""
    found = difference([scores([1.0, 3.0]), scores([2.0, 4.0])], [scores([0.0, 0.0])] * 2)
    assert found.mean == 2.5
    assert found.p == pytest.approx(2 * stats.t.sf(2.5 / 1.25**0.5, 1.25**2 / (0.5**4 + 1)))


def test_one_seed_alone_is_no_evidence() -> None:
    """A difference of one seed in five is noise of seeds, however alike the rows are."""
    base = [scores([0.0] * 200)] * 5
    assert difference([scores([1.0] * 200), *base[1:]], base).p > 0.3
    assert difference([scores([1.0] * 200)] * 4 + [scores([0.9] * 200)], base).p < 0.01


def test_noise_rarely_passes_for_a_mistake() -> None:
    random = Random(0)
    found = 0
    for _ in range(300):
        effect = [random.gauss(0, 1) for _ in range(40)]
        runs = [[scores([random.gauss(each, 1) for each in effect]) for _ in range(5)] for _ in range(2)]
        found += difference(*runs).p < 0.05
    assert found <= 15


def test_interval_and_power_by_hand() -> None:
    """Ten degrees of freedom: t is 2.228 at 97.5 % and 0.879 at 80 %."""
    found = Difference(1.0, 0.5, 10.0)
    assert found.interval == (pytest.approx(1 - 1.1141, abs=1e-4), pytest.approx(1 + 1.1141, abs=1e-4))
    assert found.detectable == pytest.approx(0.5 * (2.2281 + 0.8791), abs=1e-4)
    assert found.p == pytest.approx(2 * stats.t.sf(2.0, 10))


def test_holm_by_hand() -> None:
    """0.01 * 3, then 0.02 * 2, then 0.03 which may not be below the one before."""
    assert holm([0.03, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1))
def test_corrected_values_keep_their_order_and_are_not_smaller(values: list[float]) -> None:
    corrected = holm(values)
    assert all(0 <= old <= new <= 1 for old, new in zip(values, corrected, strict=True))
    pairs = sorted(zip(values, corrected, strict=True))
    assert [new for _, new in pairs] == sorted(corrected)


def run_folder(parent: Path, name: str, settings: Sequence[str], rewards: dict[str, float], step: int = 4) -> Path:
    """A run that was validated before and after its training: the rewards of tasks afterwards, in a set `test`."""
    folder = parent / name
    files = ["data.train_files=[rows.jsonl]", "data.val_files=[test.jsonl]", "model.path=m"]
    (folder / "validation").mkdir(parents=True)
    Path("rows.jsonl").touch()
    Path("test.jsonl").touch()
    write_records(folder, load_config([*files, f"trainer.experiment_name={name}", *settings]), TRAIN, None)
    write_jsonl(folder / "metrics.jsonl", [{"step": each, "time": 0.0} for each in (0, step)])
    for at in (0, step):
        rows = [
            {"set": "test", "step": at, "task_id": task, "reward": value, "score": {"total": value, "parts": {}}}
            for task, value in rewards.items()
        ]
        write_jsonl(folder / "validation" / f"step-{at:06d}.jsonl", rows)
    return folder


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two learning rates x two seeds: rows a and b gain 1 and 3 with seed 0, 2 and 4 with seed 1."""
    monkeypatch.chdir(tmp_path)
    base = {"a": 0.0, "b": 0.5}
    gains = {0: (1.0, 3.0), 1: (2.0, 4.0)}
    folders = [run_folder(tmp_path, f"base{seed}", [f"trainer.seed={seed}"], base) for seed in gains]
    return folders + [
        run_folder(
            tmp_path,
            f"fast{seed}",
            [f"trainer.seed={seed}", "actor.optim.lr=1e-3"],
            {row: value + gain for (row, value), gain in zip(base.items(), gains[seed], strict=True)},
        )
        for seed in gains
    ]


def test_arms_are_what_differs(study: list[Path]) -> None:
    runs = read_runs(study)
    arms = arms_of([runs[0], runs[2], runs[1], runs[3]])
    assert [(arm.name, sorted(arm.runs)) for arm in arms] == [
        ("actor.optim.lr=1e-06", [0, 1]),
        ("actor.optim.lr=0.001", [0, 1]),
    ]
    base, fast = compare(arms, last_common_step(runs))["test"]
    assert base.difference is None and base.by_seed == {0: 0.25, 1: 0.25}
    assert fast.by_seed == {0: 2.25, 1: 3.25} and fast.difference is not None
    assert fast.difference.mean == 2.5 and fast.p == fast.difference.p  # as by hand above


def test_the_command_prints_a_line_per_arm(study: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*map(str, study), "--exact"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "test after step 4: exact" in shown and "+0.500" in shown  # b is above 0 without training, a is not


def test_one_seed_has_no_difference(study: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(study[0]), str(study[2])]) == 0
    assert "fewer than two seeds that the base has" in capsys.readouterr().out


def test_seeds_that_only_one_arm_has_do_not_pair(study: list[Path], tmp_path: Path) -> None:
    more = run_folder(tmp_path, "base2", ["trainer.seed=2"], {"a": 9.0, "b": 9.0})
    runs = read_runs([*study, more])
    _, fast = compare(arms_of(runs), 4)["test"]
    assert fast.difference is not None and fast.difference.mean == 2.5


@pytest.mark.parametrize(
    ("settings", "rewards", "step", "problem"),
    [
        (["trainer.seed=1"], {"a": 0.0, "b": 0.0}, 4, "have the same settings and the same seed 1"),
        (["trainer.seed=2"], {"a": 0.0, "c": 0.0}, 4, "was validated on other rows than"),
        (["trainer.seed=2"], {"a": 0.0, "b": 0.0}, 8, r"no validation after one number of steps; .*other: \[0, 8\]"),
    ],
)
def test_what_cannot_be_compared(
    settings: list[str],
    rewards: dict[str, float],
    step: int,
    problem: str,
    study: list[Path],
    tmp_path: Path,
) -> None:
    runs = read_runs([*study, run_folder(tmp_path, "other", settings, rewards, step)])
    with pytest.raises(ConfigError, match=problem):
        compare(arms_of(runs), last_common_step(runs))


def test_a_step_without_a_validation_is_refused(study: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*map(str, study), "--step", "3"]) == 2
    assert "base0 has no validation after step 3; validated steps: 0, 4" in capsys.readouterr().err


def test_folders_that_are_no_runs(tmp_path: Path, study: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    (study[1] / "config.yaml").write_text("- 1\n")
    assert main([*map(str, study)]) == 2
    assert "config.yaml has no trainer.seed" in capsys.readouterr().err
