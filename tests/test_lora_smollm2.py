"""Adapters of a real model, on ToolRL's own rows: three steps of every way to train, a resume, and what others load."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.conftest import ROOT, real_data, smollm2
from verl.tracking.jsonl import read_jsonl

REWARD = "def score(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str) % 7 / 7\n"
COMMON = (
    *("lora.rank=16", "data.max_prompt_length=900", "data.max_response_length=24", "data.train_batch_size=2"),
    *("trainer.total_training_steps=3", "trainer.save_freq=1", "trainer.test_freq=0", "trainer.keep_last=3"),
    *("model.compute_dtype=float32", "data.val_files=[]"),
)
RL = (
    *("data.truncation=drop", "rollout.name=hf", "rollout.n=2", "trainer.val_before_train=false"),
    *("trainer.preflight=false", "actor.ppo_mini_batch_size=2", "reward.name=reward.py:score"),
)


def run(folder: Path, name: str, command: str, *overrides: str) -> Path:
    done = subprocess.run(
        [sys.executable, "-m", "toolrl", command, *COMMON, *overrides, f"trainer.experiment_name={name}"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "outputs" / name


def adapter(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / "step-000003" / "adapter" / "adapter_model.safetensors")


@torch.no_grad()
def greedy(model: PreTrainedModel | PeftModel, ids: torch.Tensor) -> list[int]:
    return list(model.generate(input_ids=ids, max_new_tokens=12, do_sample=False)[0].tolist())


@pytest.mark.slow
@pytest.mark.parametrize("base_dtype", ["auto", "nf4"])
@pytest.mark.parametrize("way", ["sft", "grpo", "ppo"])
def test_an_adapter_of_smollm2(way: str, base_dtype: str, tmp_path: Path) -> None:
    model, rows = smollm2(), real_data("toolrl", "rlla_test.parquet")
    (tmp_path / "reward.py").write_text(REWARD)
    overrides = [f"model={model}", f"data={rows}", f"lora.base_dtype={base_dtype}"]
    overrides += ["data.max_bad_share=1"] if way == "sft" else [*RL, f"algorithm.name={way}"]
    command = "sft" if way == "sft" else "train"
    straight = run(tmp_path, "straight", command, *overrides)
    steps = [row for row in read_jsonl(straight / "metrics.jsonl") if row["step"]]
    assert len(steps) == 3 and all(row["actor/grad_norm"] > 0 for row in steps)
    if way != "sft":
        assert all(row["engine/canary_logprob_diff"] < 1e-4 for row in steps)

    resumed = Path(shutil.copytree(straight, straight.with_name("resumed")))
    for name in ("step-000002", "step-000003", "latest.json"):
        path = resumed / "checkpoints" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    run(tmp_path, "resumed", command, *overrides)
    ours, again = adapter(straight), adapter(resumed)
    assert ours.keys() == again.keys() and all(torch.equal(each, again[name]) for name, each in ours.items())

    base = straight / "base" if base_dtype == "nf4" else model
    folder = straight / "checkpoints" / "step-000003"
    merged = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder / "adapter"
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    for text in ("What is the weather in Paris?", "Call a tool:", "Once upon a time"):
        ids = tokenizer(text, return_tensors="pt").input_ids
        assert greedy(merged, ids) == greedy(loaded, ids)
