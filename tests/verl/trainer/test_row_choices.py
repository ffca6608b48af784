"""`toolrl train .. --cfg job` prints what the first rows of the data select, and why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.support.tiny import MINI
from tests.verl.scoring.test_sources import CALLS, TOOLRL, row
from tests.verl.verl_compat.test_published import SCRIPTS
from verl.build.run import load_inputs
from verl.config.load import load_config
from verl.errors import ConfigError
from verl.trainer import main_ppo
from verl.trainer.row_choices import row_choices


def written(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return str(path)


def test_each_choice_of_a_file_is_named_once_with_its_reason(tmp_path: Path) -> None:
    mixed = [row("rlla", TOOLRL)] * 3 + [row("toolcall", CALLS, prompt_type="llama"), row("openai/gsm8k", "7")]
    file, absent = written(tmp_path / "rows.jsonl", *mixed), str(tmp_path / "absent.jsonl")
    overrides = [f"data.train_files=[{absent},{file}]", "actor_rollout_ref.model.path=m"]
    assert list(row_choices(load_config(overrides))) == [
        f"{file}: reward.name=rlla (by data_source rlla); data.truncation=left",
        f"{file}: reward.name=tool_n1 version=llama (by data_source toolcall); data.truncation=drop",
        f"{file}: reward.name=gsm8k (by data_source openai/gsm8k); data.truncation=drop",
    ]
    assert list(row_choices(load_config([*overrides, "reward.name=torl", "data.truncation=left"]))) == []
    unknown = written(tmp_path / "unknown.jsonl", row("mine", "7"))
    (line,) = row_choices(load_config([f"data.train_files=[{unknown}]"]))
    assert "data_source 'mine' names no reward" in line


def test_the_choices_are_comments_after_the_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "rows.jsonl", row("toolcall", CALLS, prompt_type="qwen_lexico"))
    argv = [*SCRIPTS["Tool-N1"]["overrides"], f"data.train_files=[{file}]", "--cfg", "job"]
    assert main_ppo.main(argv) == 0
    printed = capsys.readouterr().out
    assert f"# {file}: reward.name=tool_n1 version=v1 (by data_source toolcall); data.truncation=drop" in printed
    assert yaml.safe_load(printed[printed.index("data:\n") :])["reward"]["name"] == "auto"


def test_a_run_whose_reward_pays_for_a_bare_thought_does_not_start(tmp_path: Path) -> None:
    file = written(tmp_path / "rows.jsonl", *[row("openai/gsm8k", str(number)) for number in range(3)])
    overrides = [f"model.path={MINI / 'model'}", f"data.train_files=[{file}]", "algorithm.name=grpo", "rollout.n=2"]
    overrides += ["data.train_batch_size=3", "actor.ppo_mini_batch_size=3"]
    with pytest.raises(ConfigError, match="'rlla' gives the gold response 0, an empty one 0, a thought alone 1"):
        load_inputs(load_config([*overrides, "reward.name=rlla"]))
    inputs = load_inputs(load_config(overrides))
    assert inputs.choices(None).startswith("reward: gsm8k (by data_source openai/gsm8k); ")
