"""What only a GPU can show; run with -m gpu. Never run so far: no machine with a GPU was at hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from tests.tiny import run_words, save_tiny_model
from verl.tracking.jsonl import read_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]


@pytest.mark.parametrize("num_gpus", [1, 2])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_grpo_with_engines_beside_the_trainer(dtype: str, num_gpus: int, tmp_path: Path) -> None:
    """Sleep, wake, publication and canary on the trainer's own devices; nccl where there are two."""
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} GPUs")
    words = [
        word for word in run_words(save_tiny_model(tmp_path / "model"), tmp_path, "vllm", 3) if "device" not in word
    ]
    words += [
        f"model.compute_dtype={dtype}",
        f"trainer.n_gpus_per_node={num_gpus}",
        "rollout.gpu_memory_utilization=0.3",
    ]
    subprocess.run([sys.executable, "-m", "verl.trainer.main_ppo", *words], check=True, cwd=ROOT)
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["engine/canary_gap"] < (0.25 if dtype == "bfloat16" else 1e-2) for row in rows)
    assert all(row["memory/trainer_gib"] > 0 and row["perf/mfu"] >= 0 for row in rows)
