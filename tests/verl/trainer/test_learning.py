"""What the README promises of the embedded default: the policy becomes visibly better at calling tools."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

from tests.conftest import ROOT
from tests.support.tiny import MINI
from verl.algorithms import ALGORITHMS
from verl.tracking.jsonl import read_jsonl


def test_the_embedded_model_is_small_and_stored_in_bf16() -> None:
    assert sum(path.stat().st_size for path in (MINI / "model").iterdir()) < 8e6
    config = AutoConfig.from_pretrained(MINI / "model")
    assert config.model_type == "qwen2" and str(config.dtype) == "torch.bfloat16"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("algorithm", "gain", "ratio"), [("grpo", 0.8, 1.5), ("ppo", 0.4, 1.0)])
def test_the_embedded_default_learns(algorithm: str, gain: float, ratio: float, seed: int, tmp_path: Path) -> None:
    overrides = [f"recipe=mini_{algorithm}", f"trainer.seed={seed}"]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides, f"trainer.default_local_dir={tmp_path}"]
    subprocess.run(command, check=True, cwd=ROOT, env=dict(os.environ), stdout=subprocess.DEVNULL)
    rows = read_jsonl(tmp_path / f"mini_{algorithm}" / "metrics.jsonl")
    before, after = rows[0], rows[-1]
    assert 0.15 <= before["val/test/exact"] <= 0.40
    assert after["val/test/total"] >= before["val/test/total"] + gain
    assert after["val/test/exact"] >= ratio * before["val/test/exact"]
    assert "val/test_new_tools/total" in after


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name not in ("grpo", "ppo", "opd")])
def test_every_algorithm_raises_the_reward(algorithm: str, tmp_path: Path) -> None:
    """On GRPO's recipe for the embedded model, half as long."""
    overrides = ["recipe=mini_grpo", f"algorithm.name={algorithm}", "trainer.total_training_steps=24"]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides, f"trainer.default_local_dir={tmp_path}"]
    subprocess.run(command, check=True, cwd=ROOT, env=dict(os.environ), stdout=subprocess.DEVNULL)
    rows = read_jsonl(tmp_path / "mini_grpo" / "metrics.jsonl")
    assert rows[-1]["val/test/total"] >= rows[0]["val/test/total"] + 0.3
