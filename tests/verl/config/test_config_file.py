"""Settings of a user's YAML file, and the config.yaml of a run given back."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from toolrl.commands import EVAL
from verl.config.commands import SFT, TRAIN, Command
from verl.config.load import RECIPES, load_config
from verl.config.schema import Config
from verl.config.show import as_yaml
from verl.errors import ConfigError
from verl.trainer import main_ppo
from verl.trainer.cli import run_cli

BASE = ["data.train_files=[rows.jsonl]", "model.path=any"]


def given_back(config: Config, command: Command, folder: Path, *argv: str) -> Config:
    path = folder / "config.yaml"
    path.write_text(as_yaml(config, command))
    return load_config(argv, command, str(path), user_code=True)


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
    overrides = ["recipe=grpo", "model=embedded", "data=[a.jsonl]", "rollout.n=2", "actor.optim.lr=1e-5"]
    assert ours == load_config(overrides)


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


DOUBLED = "\n".join(["a0: &a0 [1, 1]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 30))])


@pytest.mark.parametrize("text", [DOUBLED, "a: &a {b: [*a]}", "rollout: &a {n: {b: *a}}"])
def test_a_file_whose_aliases_make_it_endless_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"my.yaml cannot be read \(it holds over 20000 values\)"):
        load_config([*BASE], file=str(path))


CODE = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n\n\nclass f:\n    pass\n"
NAMED = [
    ("reward: {name: 'x.py:f'}", "reward.name=x.py:f"),
    ("reward.name: 'my-module:f'", "reward.name=my-module:f"),
    ("reward: [{name: rlla, weight: 1}, {name: 'a/b.py:f', weight: 1}]", "reward.options.terms.name=a/b.py:f"),
    ("env: {name: agent, tool_call_format: hermes, command: 'run {task_json}'}", "env.command=run {task_json}"),
    ("env: {name: agent, tool_call_format: hermes, options: {agent: 'x.py:f'}}", "env.options.agent=x.py:f"),
    (
        "env: {name: verifiers, tool_call_format: xml, options: {id: a, python: ./python}}",
        "env.options.python=./python",
    ),
    (
        "env: {name: tool, tool_call_format: xml, tools: [{name: mcp, command: [sh, x]}]}",
        "env.tools.command=['sh', 'x']",
    ),
    ("env: {name: tool, tool_call_format: xml, tools: [{name: search, retriever: 'x.py:f'}]}", "retriever=x.py:f"),
    ("env: {name: 'gymnasium:make', tool_call_format: xml}", "env.name=gymnasium:make"),
    ("env.tool_call_format: 'x.py:f'", "env.tool_call_format=x.py:f"),
    ("agent: 'x.py:f'\nenv.tool_call_format: toolrl", "env.agent=x.py:f"),
    ("algorithm: {name: 'x.py:f'}", "algorithm.name=x.py:f"),
    ("algorithm: {name: 'x.py:f', norm_adv_by_std_in_grpo: true}", "algorithm.name=x.py:f"),
    ("algorithm: {name: grpo, filters: [{name: 'x.py:f'}]}", "algorithm.filters.name=x.py:f"),
    ("trainer: {logger: [console, 'my.module:Tracker']}", "trainer.logger=my.module:Tracker"),
    ("trainer: {callbacks: ['x.py:f']}", "trainer.callbacks=x.py:f"),
    ("data: {map: 'rows.py:convert', train_files: ['me/data:train']}", "data.map=rows.py:convert"),
    ("data: {map: 'x.pkl:f'}", "data.map=x.pkl:f"),
    ("data: {user_code: 'yes'}", "data.user_code=yes"),
    ("eval: {benchmarks: ['x.py:f/hard']}", "eval.benchmarks=x.py:f/hard"),
    ("custom_reward_function: {path: os, name: popen}", "custom_reward_function.path=os"),
    ("eval.output: x.py\nreward.name: '${eval.output}:f'", "reward.name=x.py:f"),
    ("rollout: {engine_options: {trust_remote_code: true}}", "rollout.engine_options.trust_remote_code=True"),
    ("rollout: {engine_options: {worker_cls: x.f}}", "rollout.engine_options.worker_cls=x.f"),
]


@pytest.mark.parametrize(("text", "named"), NAMED)
def test_code_named_by_a_config_file_needs_a_flag(
    text: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text(CODE)
    (tmp_path / "my.yaml").write_text(text)
    for own in ([], ["trainer.seed=3"]):
        with pytest.raises(ConfigError, match="names code, which is not run without --user-code: ") as caught:
            load_config(["model.path=embedded:model", *own], file="my.yaml")
        (line,) = str(caught.value).splitlines()
        assert named in line and "me/data" not in line and not (tmp_path / "ran").exists()


def test_a_flag_allows_code_named_by_a_config_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("reward: {name: 'x.py:f'}\nmodel.path: embedded:model\n")
    with_code = ["--config", str(path), "--cfg", "job"]
    assert main_ppo.main(with_code) == 2 and "reward.name=x.py:f" in capsys.readouterr().out
    assert main_ppo.main([*with_code, "--user-code"]) == 0 and "name: x.py:f" in capsys.readouterr().out
    assert main_ppo.main([*with_code, "reward.name=math"]) == 0  # the file's is not used
    assert main_ppo.main([*with_code, "reward.name=y.py:f"]) == 0  # the command names it
    assert main_ppo.main(["--user-code", "--cfg", "job"]) == 2 and "--config" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        "env: {name: remote, tool_call_format: xml, options: {urls: ['http://host:8000'], system: 'Answer: yes'}}",
        "sandbox: {urls: ['http://10.0.0.1:8080']}\nenv: {name: tool, tools: [python], tool_call_format: xml}",
        "data: {map: 'toolrl.papers.rows:with_box'}",
        "custom_reward_function: {path: null, name: compute_score}",
        "trainer: {experiment_name: a_b, default_local_dir: /x/y}",
        "eval.options: {judge: {url: 'https://host:443/v1', model: m}}",
    ],
)
def test_texts_that_name_no_code_are_read(text: str, tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(text)
    assert load_config(["model.path=embedded:model"], file=str(path))


def test_a_recipe_is_a_name_and_no_path(tmp_path: Path) -> None:
    (tmp_path / "evil.yaml").write_text("reward: {name: 'x.py:f'}\n")
    for name in (tmp_path / "evil", f"../../../../../../..{tmp_path}/evil"):
        path = tmp_path / "my.yaml"
        path.write_text(f"recipe: {name}\nmodel: embedded\n")
        with pytest.raises(ConfigError, match="unknown recipe"):
            load_config([], file=str(path))


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
    argv = [each.format(path) for each in option]
    assert run_cli(["data=x.jsonl", *argv], "", TRAIN, lambda args, console: seen.append(args.config.rollout.n)) == 0
    assert seen == [3]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--config"], "--config needs a value"),
        (["--config="], "--config takes one YAML file, once"),
        (["--config=a.yaml", "--config=b.yaml"], "--config takes one YAML file, once"),
    ],
)
def test_a_command_takes_one_file(options: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli([*BASE, *options], "", TRAIN, lambda args, console: 0) == 2
    assert problem in capsys.readouterr().out
