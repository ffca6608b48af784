"""Settings of a user's YAML file, and the config.yaml of a run given back."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from verl.config.commands import EVAL, SFT, TRAIN, Command
from verl.config.load import RECIPES, load_config
from verl.config.schema import Config
from verl.config.show import as_yaml
from verl.errors import ConfigError
from verl.trainer.cli import run_cli

BASE = ["data.train_files=[rows.jsonl]", "model.path=any"]


def given_back(config: Config, command: Command, folder: Path, *argv: str) -> Config:
    path = folder / "config.yaml"
    path.write_text(as_yaml(config, command))
    return load_config(argv, command, str(path))


@pytest.mark.parametrize("recipe", sorted(each.stem for each in RECIPES.glob("*.yaml")))
def test_the_config_of_a_run_gives_the_same_run(recipe: str, tmp_path: Path) -> None:
    config = load_config([f"recipe={recipe}", *BASE])
    assert given_back(config, TRAIN, tmp_path) == config
    assert given_back(config, TRAIN, tmp_path, "trainer.seed=7").trainer.seed == 7


@pytest.mark.parametrize(
    "argv",
    [
        [*BASE, "data.columns={a.b: prompt, c: answer}", "reward=[{name: rlla}, {name: 'me.py:f', weight: 2}]"],
        [*BASE, "env.name=tool", "env.tool_call_format=toolrl", "env.tools=[python, {name: search, topk: 3}]"],
        [*BASE, "env.name=agent", "env.command='run {task_json}'", "env.tool_call_format=hermes"],
    ],
)  # fmt: skip
def test_nested_values_come_back(argv: list[str], tmp_path: Path) -> None:
    config = load_config(argv)
    assert given_back(config, TRAIN, tmp_path) == config


def test_other_commands_take_their_files(tmp_path: Path) -> None:
    for command in (SFT, EVAL):
        config = load_config(["model.path=any"], command)
        assert given_back(config, command, tmp_path) == config


def test_arguments_override_a_file_and_a_file_its_recipe(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("recipe: grpo\nmodel: embedded\ndata: [a.jsonl]\nrollout.n: 4\nactor:\n  optim: {lr: 1.0e-5}\n")
    ours = load_config(["rollout.n=2"], file=str(path))
    told = ["recipe=grpo", "model=embedded", "data=[a.jsonl]", "rollout.n=2", "actor.optim.lr=1e-5"]
    assert ours == load_config(told)


def test_a_file_in_verls_spelling(tmp_path: Path) -> None:
    path = tmp_path / "verl.yaml"
    path.write_text("actor_rollout_ref:\n  model: {path: any}\n  rollout: {n: 3}\nalgorithm: {adv_estimator: grpo}\n")
    config = load_config(["data.train_files=[x.jsonl]"], file=str(path))
    assert (config.model.path, config.rollout.n, config.algorithm.advantage_of) == ("any", 3, "grpo")


def test_keys_of_a_file_without_effect_are_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("trainer: {test_freq: 3}\n")
    with caplog.at_level(logging.WARNING):
        load_config([*BASE], file=str(path))
    assert "trainer.test_freq: there are no data.val_files to validate on" in caplog.text
    with pytest.raises(ConfigError, match=r"trainer.test_freq=3 has no effect"):
        load_config([*BASE, "trainer.test_freq=3"], file=str(path))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("reward: {name: 'me.py:score'}", "reward.name=me.py:score"),
        ("env: {name: agent, tool_call_format: hermes, command: 'run {task_json}'}", "env.command=run {task_json}"),
        ("trainer: {logger: [console, 'my.module:Tracker']}", "my.module:Tracker"),
        ("reward: [{name: rlla, weight: 1}, {name: 'a/b.py:f', weight: 1}]", "a/b.py:f"),
        ("data: {map: 'rows.py:convert', train_files: ['me/data:train']}", "data.map=rows.py:convert"),
    ],
)  # fmt: skip
def test_code_of_a_file_is_announced(text: str, named: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        load_config(["model.path=embedded:model", "rollout.n=2"], file=str(path))
    (line,) = [each for each in caplog.messages if "names code that this command runs" in each]
    assert named in line and "me/data:train" not in line


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- a\n- b\n", "must have settings"),
        ("a: [", "cannot be read"),
        ("rollout: {m: 8}\n", "unknown key 'rollout.m'"),
        ("rollout: {n: many}\n", "rollout.n"),
    ],
)
def test_a_file_that_cannot_be_used(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        load_config(BASE, file=str(path))
    with pytest.raises(ConfigError, match=r"absent.yaml cannot be read"):
        load_config(BASE, file=str(tmp_path / "absent.yaml"))


@pytest.mark.parametrize("option", [["--config={}"], ["--config", "{}"]])
def test_a_command_takes_a_file(option: list[str], tmp_path: Path) -> None:
    path, seen = tmp_path / "my.yaml", []
    path.write_text("model: any\nrollout: {n: 3}\n")
    words = [each.format(path) for each in option]
    assert run_cli(["data=x.jsonl", *words], "", TRAIN, lambda args, console: seen.append(args.config.rollout.n)) == 0
    assert seen == [3]


@pytest.mark.parametrize("options", [["--config"], ["--config="], ["--config=a.yaml", "--config=b.yaml"]])
def test_a_command_takes_one_file(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli([*BASE, *options], "", TRAIN, lambda args, console: 0) == 2
    assert "--config takes one YAML file, once" in capsys.readouterr().out
