"""The comparison of runs with a mistake and runs without one, and the folders in which they are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.sensitivity import learning
from bench.sensitivity.learning import (
    CONDITIONS,
    NEEDED,
    RIGHT,
    condition_of,
    folder_of,
)
from bench.sensitivity.mistakes import MISTAKES
from bench.sensitivity.suite import failing
from verl.config.load import load_config

LEARNING = "tests/verl/algorithms/test_algorithm_learning.py::test_every_algorithm_raises_the_embedded_models_reward"


def test_conditions_are_configurations_for_known_mistakes() -> None:
    names = [each.name for each in MISTAKES]
    assert set(NEEDED) <= set(names) and set(NEEDED.values()) < set(CONDITIONS)
    data = ("data.train_files=[train.jsonl]", "data.val_files=[test.jsonl]")
    for name, overrides in CONDITIONS.items():
        trainer = load_config([*overrides, *data]).trainer
        assert (trainer.total_training_steps, trainer.test_freq) == ((4, 2) if name == "first steps" else (16, 8))


def test_every_row_counts_with_its_mean_over_validations(tmp_path: Path) -> None:
    for step, rewards in {4: (1.0, 2.0), 8: (3.0, 2.0)}.items():
        lines = [json.dumps({"set": "test", "task_id": f"t#{row}", "reward": each}) for row, each in enumerate(rewards)]
        (tmp_path / f"step-{step:06d}.jsonl").write_text("\n".join(lines) + "\n")
    assert learning.scores_of(tmp_path) == {("test", "t#0"): 2.0, ("test", "t#1"): 2.0}


def test_the_table_needs_all_runs_of_a_mistake(tmp_path: Path) -> None:
    for name, value in ((RIGHT, 1.0), ("untrained_end", 0.5)):
        for seed in range(2):
            folder = folder_of(tmp_path, condition_of(name), name, seed)
            folder.mkdir(parents=True)
            rows = [["test", str(row), value + 0.01 * (row + seed)] for row in range(3)]
            (folder / "scores.json").write_text(json.dumps(rows))
    lines = learning.table(tmp_path, range(2)).splitlines()
    assert lines[2].startswith("| untrained_end | plain | 1.015 | -0.500 |")
    assert lines[-1].startswith("2 seeds. Without runs: flipped_advantages,")
    assert "untrained_end" not in lines[-1]
    assert "untrained_end" in learning.table(tmp_path, range(3)).splitlines()[-1]


def test_an_unknown_mistake_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        learning.main([str(tmp_path), "no_such"])
    assert "unknown: no_such; known: flipped_advantages, " in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("name", ["shifted_advantages", "rewards_of_the_previous_step", "stale_weights"])
def test_a_policy_does_not_learn_with_a_mistake(name: str) -> None:
    """Without a mistake the same test passes."""
    [mistake] = [each for each in MISTAKES if each.name == name]
    assert failing(mistake, ["-m", "long", f"{LEARNING}[grpo]"]) == [f"{LEARNING}[grpo]"]
