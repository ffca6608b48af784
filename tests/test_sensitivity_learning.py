"""The comparison of runs with a mistake and runs without one, and the folders in which they are kept."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from scipy import stats

from bench.sensitivity import learning
from bench.sensitivity.learning import (
    CONDITIONS,
    NEEDED,
    RIGHT,
    condition_of,
    difference,
    folder_of,
)
from bench.sensitivity.mistakes import MISTAKES
from verl.config.load import load_config


def scores(values: list[float]) -> dict[tuple[str, str], float]:
    return {("test", str(row)): value for row, value in enumerate(values)}


def test_conditions_are_configurations_for_known_mistakes() -> None:
    names = [each.name for each in MISTAKES]
    assert set(NEEDED) <= set(names) and set(NEEDED.values()) < set(CONDITIONS)
    data = ("data.train_files=[train.jsonl]", "data.val_files=[test.jsonl]")
    for overrides in CONDITIONS.values():
        assert load_config([*overrides, *data]).trainer.total_training_steps == 16


def test_every_row_counts_with_its_mean_over_validations(tmp_path: Path) -> None:
    for step, rewards in {4: (1.0, 2.0), 8: (3.0, 2.0)}.items():
        lines = [json.dumps({"set": "test", "task_id": f"t#{row}", "reward": each}) for row, each in enumerate(rewards)]
        (tmp_path / f"step-{step:06d}.jsonl").write_text("\n".join(lines) + "\n")
    assert learning.scores_of(tmp_path) == {("test", "t#0"): 2.0, ("test", "t#1"): 2.0}


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


def test_the_table_needs_all_runs_of_a_mistake(tmp_path: Path) -> None:
    for name, value in ((RIGHT, 1.0), ("late_mask", 0.5)):
        for seed in range(2):
            folder = folder_of(tmp_path, condition_of(name), name, seed)
            folder.mkdir(parents=True)
            rows = [["test", str(row), value + 0.01 * (row + seed)] for row in range(3)]
            (folder / "scores.json").write_text(json.dumps(rows))
    lines = learning.table(tmp_path, range(2)).splitlines()
    assert lines[2].startswith("| late_mask | plain | 1.015 | -0.500 |")
    assert lines[-1].startswith("2 seeds. Without runs: flipped_advantages,")
    assert "late_mask" not in lines[-1]
    assert "late_mask" in learning.table(tmp_path, range(3)).splitlines()[-1]


def test_an_unknown_mistake_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        learning.main([str(tmp_path), "no_such"])
    assert "unknown: no_such; known: flipped_advantages, " in capsys.readouterr().err
