"""`data=` and `model=`, and the recipe that a command with them has by default."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.support.tiny import MINI
from toolrl.commands import EVAL, GENERATE, PROBE
from verl.config import load
from verl.config.commands import SFT, TRAIN, Command
from verl.config.load import load_config
from verl.errors import ConfigError


@pytest.mark.parametrize(
    ("argv", "command", "train_files", "val_files"),
    [
        (["data=mine.jsonl"], TRAIN, ["mine.jsonl"], []),
        (["data=[a.jsonl,b.parquet]"], TRAIN, ["a.jsonl", "b.parquet"], []),
        (["data=owner/name@config:split"], SFT, ["owner/name@config:split"], []),
        (["data=embedded:test.parquet"], PROBE, [str(MINI / "test.parquet")], []),
        (["data=mine.jsonl"], GENERATE, [], ["mine.jsonl"]),
    ],
)
def test_data_is_the_file_that_a_command_reads(
    argv: list[str], command: Command, train_files: list[str], val_files: list[str]
) -> None:
    data = load_config([*argv, "model=any"], command).data
    assert (data.train_files, data.val_files) == (train_files, val_files)


def test_evaluation_takes_data_as_a_benchmark() -> None:
    assert load_config(["data=mine.jsonl", "model=any"], EVAL).eval.benchmarks == ["mine.jsonl"]


def test_model_is_a_path_or_the_embedded_one() -> None:
    assert load_config(["model=me/mine"]).model.path == load_config(["model.path=me/mine"]).model.path == "me/mine"
    assert load_config(["model=embedded"], EVAL).model.path == str(MINI / "model")


@pytest.mark.parametrize("key", ["model", "model.path", "actor_rollout_ref.model.path", "eval.compare", "critic.path"])
def test_names_of_models_are_the_same_everywhere(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = EVAL if key == "eval.compare" else TRAIN
    other = [] if key.endswith("model.path") or key == "model" else ["model.path=any"]
    other += ["algorithm.name=ppo"] if command is TRAIN else []

    def path(name: str) -> str | None:
        config = load_config([f"{key}={name}", *other], command)
        return {"critic.path": config.critic.path, "eval.compare": config.eval.compare}.get(key, config.model.path)

    assert path("embedded") == path("embedded:model") == str(MINI / "model")
    monkeypatch.setattr(load, "_SMOLLM2", tmp_path / "smollm2")
    with pytest.raises(ConfigError, match=r"smollm2 is not there; run scripts/prepare_smollm2.py"):
        path("smollm2")
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "config.json").touch()
    assert path("smollm2") == str(tmp_path / "smollm2") and path("me/smollm2") == "me/smollm2"


@pytest.mark.parametrize("key", ["model", "model.path"])
def test_a_run_is_its_newest_model(key: str, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    assert load_config([f"{key}={tmp_path}"], SFT).model.path == str(tmp_path)  # checkpoints to come
    (tmp_path / "checkpoints" / "latest.json").write_text('{"step": 7, "folder": "step-000007", "score": null}')
    assert load_config([f"{key}={tmp_path}"], SFT).model.path == f"{tmp_path}/checkpoints/step-000007/hf"


def test_the_default_recipe_is_that_of_the_model_and_announced(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ours = load_config(["data=x.jsonl", "model=embedded"])
    assert caplog.messages == ["recipe=embedded, the default with data=..; --cfg job prints its settings"]
    assert ours == load_config(["recipe=embedded", "data=x.jsonl", "model=embedded"])
    assert ours == load_config(["data=x.jsonl", "model.path=embedded"])
    large = load_config(["data=x.jsonl", "model=any", "rollout.n=4"])
    assert large == load_config(["recipe=grpo", "data=x.jsonl", "model=any", "rollout.n=4"])
    assert (large.algorithm.name, large.env.tool_call_format, large.reward.name) == ("grpo", "auto", "auto")
    assert large.data.val_files == [] and large.rollout.n == 4


@pytest.mark.parametrize("argv", [["data.train_files=[x.jsonl]"], ["recipe=mini_grpo", "data=x.jsonl"]])
def test_no_other_command_has_a_default_recipe(argv: list[str], caplog: pytest.LogCaptureFixture) -> None:
    load_config([*argv, "model=any"])
    assert not [each for each in caplog.messages if "the default with data=" in each]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["data=x", "data.train_files=[y]"], "data.train_files is given twice, once by its shorthand data="),
        (["model.path=a", "model=b"], "model.path is given twice, once by its shorthand model="),
        (["data.split_turns=first"], "data.split_turns must be all or last, got 'first'"),
        (["data.val_share=1.5"], "data.val_share must be between 0 and 1"),
        (["data.val_share=0.1", "data.val_files=[x]"], "data.val_share holds out training rows in place of"),
    ],
)
def test_contradictory_shorthands_are_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    assert message in str(caught.value)


def test_held_out_rows_are_validated_on() -> None:
    assert load_config(["data=x", "model=any", "data.val_share=0.1", "trainer.test_freq=3"]).trainer.test_freq == 3
