"""A run on a multimodal checkpoint whose layers have state: real ranks, and an engine that gets its weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.support.multimodal import multimodal_config
from tests.support.tiny import MINI, run_overrides
from verl.pretrained import class_of
from verl.trainer.main_ppo import main


@pytest.mark.long
def test_two_steps_of_a_multimodal_model_with_states(tmp_path: Path) -> None:
    """The engine computes what the trainer does, in every step; the towers of the export are the model's own."""
    tokenizer, model = AutoTokenizer.from_pretrained(MINI / "tokenizer"), tmp_path / "model"
    torch.manual_seed(0)
    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = multimodal_config("qwen3_5", len(tokenizer), **tokens)
    class_of(config).from_config(config).bfloat16().save_pretrained(model)
    tokenizer.save_pretrained(model)
    assert main(run_overrides(model, tmp_path / "out", "hf", 2)) == 0
    run = tmp_path / "out" / "run"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [each["step"] for each in steps if "engine/canary_logprob_diff" in each] == [1, 2]
    for each in steps:
        assert each["engine/canary_logprob_diff"] < 1e-4 and each["engine/logprob_diff_max"] < 1e-3
    (exported,) = run.glob("checkpoints/*/hf/model.safetensors")
    before, after = load_file(model / "model.safetensors"), load_file(exported)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and not any(".visual." in name for name in changed)
