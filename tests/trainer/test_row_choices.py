"""`toolrl train .. --cfg job` prints what the first rows of the data select, and why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.config.test_published import SCRIPTS
from tests.scoring.test_sources import CALLS, TOOLRL, row
from verl.config.load import load_config
from verl.trainer import main_ppo
from verl.trainer.row_choices import row_choices


def written(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return str(path)


def test_each_choice_of_a_file_is_named_once_with_its_reason(tmp_path: Path) -> None:
    mixed = [row("rlla", TOOLRL)] * 3 + [row("toolcall", CALLS, prompt_type="llama"), row("openai/gsm8k", "7")]
    file, absent = written(tmp_path / "rows.jsonl", *mixed), str(tmp_path / "absent.jsonl")
    words = [f"data.train_files=[{absent},{file}]", "actor_rollout_ref.model.path=m"]
    assert list(row_choices(load_config(words))) == [
        f"{file}: reward.name=rlla (by data_source rlla); data.truncation=left",
        f"{file}: reward.name=tool_n1 version=llama (by data_source toolcall); data.truncation=drop",
        f"{file}: reward.name=gsm8k (by data_source openai/gsm8k); data.truncation=drop",
    ]
    assert list(row_choices(load_config([*words, "reward.name=torl", "data.truncation=left"]))) == []
    unknown = written(tmp_path / "unknown.jsonl", row("mine", "7"))
    (said,) = row_choices(load_config([f"data.train_files=[{unknown}]"]))
    assert "data_source 'mine' names no reward" in said


def test_the_choices_are_comments_after_the_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "rows.jsonl", row("toolcall", CALLS, prompt_type="qwen_lexico"))
    argv = [*SCRIPTS["Tool-N1"]["words"], f"data.train_files=[{file}]", "--cfg", "job"]
    assert main_ppo.main(argv) == 0
    printed = capsys.readouterr().out
    assert f"# {file}: reward.name=tool_n1 version=v1 (by data_source toolcall); data.truncation=drop" in printed
    assert yaml.safe_load(printed[printed.index("data:\n") :])["reward"]["name"] == "auto"
