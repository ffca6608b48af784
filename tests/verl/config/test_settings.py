"""The configuration is one tree: small, every setting used or tested and documented, and every key has an effect."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from tests.conftest import ROOT
from tests.support.tiny import MINI, run_overrides
from toolrl.benchmarks.runner.benchmark import BenchmarkContext
from toolrl.benchmarks.runner.evaluate import evaluate
from toolrl.commands import CHAT, EVAL, GENERATE, LAB, PLAN, PROBE
from toolrl.sandbox.client import RemoteSandbox
from verl.build.algorithm import build_algorithm
from verl.build.engines import engine_dtype
from verl.build.env import build_sandbox
from verl.build.ranks import rank_spec
from verl.build.run import train_sampling, val_sampling
from verl.config.commands import SFT, TRAIN, Command, within
from verl.config.load import RECIPES, flattened, known_keys, load_config
from verl.config.schema import Config
from verl.config.show import as_yaml, described
from verl.errors import ConfigError
from verl.trainer import main_ppo
from verl.verl_compat.legacy import our_key
from verl.verl_compat.verl_keys import SAME_AS, short, vocabulary
from verl.workers.rank import RankSpec

COMMANDS = (TRAIN, PLAN, SFT, EVAL, GENERATE, CHAT, PROBE, LAB)
KEYS = [key.rstrip(".") for key in known_keys()]
OPEN = [key.rstrip(".") for key in known_keys() if key.endswith(".")]


@cache
def texts(*patterns: str) -> str:
    found = [path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()]
    return "\n".join(path.read_text(encoding="utf-8", errors="ignore") for path in found)


@cache
def used_keys() -> frozenset[str]:
    """Keys of the recipes and of the published commands."""
    file = Path(__file__).parents[1] / "verl_compat" / "published_commands.json"
    published = json.loads(file.read_text())["scripts"].values()
    keys = [word.lstrip("+").partition("=")[0] for script in published for word in script["overrides"]]
    recipes = [flattened(OmegaConf.to_container(OmegaConf.load(path))) for path in RECIPES.glob("*.yaml")]
    found = [key for recipe in recipes for key in recipe] + [SAME_AS.get(short(word), our_key(word)) for word in keys]
    return frozenset(found)


def named(key: str, text: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", text) is not None


def test_the_tree_has_at_most_165_settings() -> None:
    assert len(KEYS) == len(set(KEYS)) <= 165  # one of them lets rows name code


def test_every_setting_is_used_or_tested_and_documented() -> None:
    used = [key for key in KEYS if any(f"{each}.".startswith(f"{key}.") for each in used_keys())]
    others = [key for key in KEYS if key not in used and not named(key, texts("scripts/**/*.sh", "*.sh"))]
    for where in (("tests/**/*.py",), ("docs/**/*.md", "README.md")):
        assert [key for key in others if not named(key, texts(*where))] == [], f"set and named nowhere, in {where}"


def lines_of(path: Path) -> Iterator[str]:
    """Command lines of a document or a script: lines of code blocks, and code within sentences."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    if path.suffix == ".md":
        sentences = re.sub(r"(?ms)^```.*?^```$", "", text)
        yield from (code.replace("\n", " ") for code in re.findall(r"`([^`]+)`", sentences))
        text = "".join(re.findall(r"(?ms)^```\w*\n(.*?)^```$", text))
    yield from text.splitlines()


WRITTEN = [*ROOT.glob("docs/**/*.md"), ROOT / "README.md", *ROOT.glob("scripts/**/*.sh"), *ROOT.glob("*.sh")]
BY_NAME = {command.name: command for command in COMMANDS}
BY_NAME |= {"main_ppo": TRAIN, "main_sft": SFT, "main_generation": GENERATE, "main_eval": EVAL}


def commands_of(path: Path) -> Iterator[tuple[Command, list[str]]]:
    """(command, its keys) of every command line."""
    for line in lines_of(path):
        found = re.search(r"(?:toolrl |verl\.trainer\.|-m verl\.)(\w+) (.*)", line)
        if found and found[1] in BY_NAME:
            keys = re.findall(r"(?:^| |\[)([a-z_]+(?:\.[a-z_]+)*)=", found[2])
            yield BY_NAME[found[1]], [our_key(key) for key in keys if key != "key"]


def test_command_lines_in_documents_and_scripts_have_keys_of_their_command() -> None:
    seen = 0
    theirs = set(map(short, vocabulary()))
    for path in WRITTEN:
        for command, keys in commands_of(path):
            assert command.from_recipe or "recipe" not in keys, path
            for key in set(keys) - theirs:
                full = {"agent": "env.agent"}.get(key, key)  # a shorthand of the commands that have it
                known = key in ("recipe", "data", "model") or (within(full, tuple(KEYS)) and command.has(full))
                assert known, (path, command.name, key)
            seen += len(keys)
    assert seen > 100


def test_keys_in_documents_exist() -> None:
    groups = {key[: place.start()] for key in KEYS for place in re.finditer(r"\.", key)}
    top = "|".join(sorted({key.partition(".")[0] for key in KEYS}))
    known = {*KEYS, *groups, *vocabulary(), *map(short, vocabulary())}
    for path in WRITTEN:
        text = path.read_text(encoding="utf-8")
        for key in re.findall(rf"(?<![\w./:\[(-])((?:{top})(?:\.[a-z_]+)+)(?=[=`,\s])", text):
            opened = any(key.startswith(f"{each}.") for each in OPEN)
            assert key in known or opened or key.endswith((".md", ".py", ".json", ".parquet")), (path, key)


def test_every_setting_belongs_to_a_command() -> None:
    assert [key for key in KEYS if not any(command.has(key) for command in COMMANDS)] == []


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_a_command_names_keys_that_exist_and_shows_those_alone(command: Command) -> None:
    groups = {key[: place.start()] for key in KEYS for place in re.finditer(r"\.", key)}
    assert {*command.uses, *command.from_recipe} <= {*KEYS, *groups} and set(command.defaults) <= set(KEYS)
    assert all(command.has(key) for key in command.defaults)
    assert all(command.default_of(key) != TRAIN.default_of(key) for key in command.defaults)
    shown = flattened(OmegaConf.to_container(OmegaConf.create(as_yaml(load_config([], command), command))))
    assert sorted(shown) == sorted(key for key in KEYS if command.has(key))
    assert [key for key, *_ in described(command)] == list(shown)
    assert shown.items() >= command.defaults.items()


def spec_of(*overrides: str) -> RankSpec:
    config = load_config(["model.path=m", "algorithm.name=ppo", *overrides])
    return rank_spec(config, build_algorithm(config.algorithm, 64, 0), "cpu", total_steps=10)


@pytest.mark.parametrize(
    ("word", "place", "value"),
    [
        ("actor.grad_clip=0.5", "optimizer.max_grad_norm", 0.5),
        ("actor.grad_clip=0.7", "critic_optimizer.max_grad_norm", 0.7),
        ("actor.optim.betas=[0.8,0.9]", "critic_optimizer.betas", (0.8, 0.9)),
        ("actor.optim.schedule=cosine", "critic_optimizer.schedule", "cosine"),
        ("actor.optim.lr=0.5", "critic_optimizer.lr", 1e-5),
        ("critic.optim.weight_decay=0.2", "critic_optimizer.weight_decay", 0.2),
        ("critic.optim.warmup_steps=0.25", "critic_optimizer.warmup_steps", 10),  # of 40 updates
        ("critic.optim.warmup_steps=3", "critic_optimizer.warmup_steps", 3),
    ],
)
def test_settings_of_the_optimizers_reach_the_ranks(word: str, place: str, value: object) -> None:
    found: Any = spec_of(word)
    for name in place.split("."):
        found = getattr(found, name)
    assert found == value


@pytest.mark.parametrize(("word", "dtype"), [("rollout.dtype=auto", "bfloat16"), ("rollout.dtype=float32", "float32")])
def test_engines_use_the_dtype_of_the_trainer_unless_it_is_set(word: str, dtype: str) -> None:
    assert engine_dtype(load_config([word])) == dtype


def test_the_end_of_a_schedule_reaches_the_ranks() -> None:
    spec = spec_of("actor.optim.schedule=cosine", "actor.optim.min_lr_ratio=0.2")
    assert spec.critic_optimizer is not None and spec.critic_optimizer.min_lr_ratio == 0.2
    assert spec.optimizer is not None and spec.optimizer.min_lr_ratio == 0.2


def test_sampling_of_validation_is_cut_on_its_own() -> None:
    overrides = ["data.val_files=[x]", "rollout.val_kwargs.temperature=1.0", "rollout.val_kwargs.top_k=5"]
    config = load_config(overrides)
    sampling = val_sampling(config, train_sampling(config, (3,)))
    assert (sampling.top_k, sampling.temperature) == (5, 1.0)


def test_bounds_of_a_rejection_reach_the_algorithm() -> None:
    overrides = ["algorithm.correction.rejection_level=token", "algorithm.correction.rejection_bounds=[0.25,3]"]
    correction = build_algorithm(load_config(overrides).algorithm, 64, 0).correction
    assert correction is not None
    assert (correction.rejection_lower, correction.rejection_upper) == (0.25, 3.0)


def test_the_memory_of_code_reaches_the_sandbox() -> None:
    overrides = ["recipe=torl", "sandbox.urls=['http://localhost:1']", "sandbox.memory_mib=333", "sandbox.timeout_s=7"]
    sandbox = build_sandbox(load_config(overrides).sandbox)
    assert isinstance(sandbox, RemoteSandbox)
    assert (sandbox.limits.memory_mib, sandbox.limits.wall_s) == (333, 7.0)


@pytest.mark.parametrize(
    ("isolation", "expected"),
    [("strict", ("bubblewrap", True)), ("bubblewrap", ("bubblewrap", False)), ("none", ("none", False))],
)
def test_strict_isolation_is_bubblewrap_with_a_cgroup(
    isolation: str, expected: tuple[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(_: int, isolation: str, *, require_cgroup: bool, **__: Any) -> tuple[str, bool]:
        return isolation, require_cgroup

    monkeypatch.setattr("verl.build.env.resolve", lambda *_: made)
    config = load_config(["recipe=torl", f"sandbox.isolation={isolation}"])
    assert build_sandbox(config.sandbox) == expected


@pytest.mark.long
@pytest.mark.parametrize("wanted", [True, False])
def test_a_dry_run_can_be_asked_for(
    wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def reached(name: str) -> Any:
        def refuse(*_: object) -> None:
            raise ConfigError(f"reached {name}")

        return refuse

    monkeypatch.setattr("toolrl.check.preflight.preflight.preflight", reached("the dry run"))
    monkeypatch.setattr("verl.build.run.start_run", reached("the run"))
    overrides = run_overrides(MINI / "model", tmp_path, "hf", steps=1)
    assert main_ppo.main([*overrides, f"trainer.preflight={wanted}"]) == 2
    assert ("reached the dry run" if wanted else "reached the run") in capsys.readouterr().out


def test_the_settings_of_an_evaluation_reach_its_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    class ReachedError(Exception):
        pass

    def build(names: list[str], context: BenchmarkContext) -> Iterator[None]:
        assert context.data_dir == Path("folder")
        assert (context.search, context.judge, context.user) == ({"topk": 5}, {"url": "http://x"}, {"user": "chat"})
        assert (context.max_tool_calls, context.tool_call_format) == (2, "hermes")
        assert (context.reward, context.reward_options) == ("math", {"a": 1})
        raise ReachedError(names)

    monkeypatch.setattr("toolrl.benchmarks.runner.evaluate.build_benchmarks", build)
    overrides = ["eval.data_dir=folder", "eval.options={search: {topk: 5}, judge: {url: 'http://x'}}"]
    overrides += ["eval.options.user={user: chat}", "env.max_tool_calls=2", "reward.name=math", "reward.options={a: 1}"]
    overrides += ["eval.handler=hermes", "eval.benchmarks=[tau2]", f"model.path={MINI / 'model'}"]
    with pytest.raises(ReachedError, match="tau2"):
        asyncio.run(evaluate(load_config(overrides, EVAL), Console(quiet=True)))


def test_limits_of_a_benchmark_are_its_own_unless_set() -> None:
    assert load_config([], EVAL).env.max_tool_calls is None
    assert Config().env.call_limit == 8
    assert load_config(["env.max_tool_calls=0"], EVAL).env.call_limit == 0


def test_a_text_for_a_list_is_a_list_of_one() -> None:
    overrides = ("recipe=torl", "data.train_files=a.jsonl", "env.tools=python", "env.observation_cut=tail")
    config = load_config([*overrides, "trainer.logger=jsonl", "eval.benchmarks=bfcl"])
    assert (config.data.train_files, config.env.tools, config.env.observation_cut) == (
        ["a.jsonl"],
        ["python"],
        ["tail"],
    )
    assert (config.trainer.logger, config.eval.benchmarks) == (["jsonl"], ["bfcl"])
