"""Prompts that are too long: cut on the left wherever a prompt is used, left out, or an error."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.raw.rlla import to_row
from tests.conftest import ROOT, real_data
from tests.support.local_run import local_trainer
from tests.support.tiny import run_overrides, save_tiny_model
from tests.verl.data.test_tasks import example
from tests.verl.episodes.test_episode import AskFormat, Echoes, Speaker
from toolrl.check.plan.plan import read_lengths
from toolrl.commands import PROBE
from verl.batch.samples import to_batch
from verl.build.env import prompt_fn, single_turn_runner, truncating
from verl.build.run import load_inputs
from verl.chat.observations import ObservationTokenizer
from verl.chat.template import ChatTemplate
from verl.config.load import load_config
from verl.config.schema import DataConfig
from verl.data.lengths import read_tasks
from verl.data.report import RowReport
from verl.envs.base import Observation
from verl.episodes.episode import EpisodeLimits, EpisodeRunner
from verl.episodes.group import GroupRollout
from verl.errors import DataError
from verl.rollout.engine import Sampling
from verl.scoring.pool import DirectScorer
from verl.sft import demonstrations as sft
from verl.tracking.jsonl import read_jsonl
from verl.trainer import main_eval, main_generation
from verl.types import Message, Task
from verl.utils.reward_score.base import build_reward

LONG = tuple(Message(role, f"{role} wrote {'very ' * 30}much") for role in ("system", "user"))
TASK = Task("rows.jsonl#0", LONG, "The answer", "mine")


@pytest.mark.parametrize("length", [1, 7, 10_000])
def test_truncation_keeps_the_last_tokens(length: int, chat: ChatTemplate) -> None:
    """As veRL's `input_ids[:, -max_length:]`: tokens are cut, not text, and the head of the response's turn stays."""
    whole, cut = chat.prompt_ids(LONG), replace(chat, max_prompt_tokens=length)
    assert cut.task_prompt_ids(TASK) == cut.initial_ids(LONG) == whole[-length:]
    assert cut.initial_ids("a text without a template") == chat.initial_ids("a text without a template")[-length:]
    assert cut.prompt_ids(LONG) == whole  # observations and demonstrations are no prompts of episodes


def test_episodes_of_one_response_and_of_several_turns_begin_with_the_cut_tokens(chat: ChatTemplate) -> None:
    observations = ObservationTokenizer(chat, AskFormat(), 16)
    uncut = EpisodeRunner(Echoes(), observations, EpisodeLimits(max_prompt_length=40, max_tokens=200))
    config = DataConfig(max_prompt_length=40, truncation="left")
    in_turns = observations.prompt_ids(Observation(LONG))
    for setting, num_turns, whole in ((single_turn_runner(chat, 50), 1, chat.prompt_ids(LONG)), (uncut, 2, in_turns)):
        kept = whole[-40:]
        engine = Speaker(chat, "<ask>hi</ask>\n", "done")
        scorer = DirectScorer(build_reward("search_r1", {}))
        group = asyncio.run(GroupRollout(engine, scorer, Sampling(50), truncating(config, setting)).run(TASK, 1, 0))
        (trajectory,) = group.trajectories
        assert len(trajectory.turns) == num_turns and tuple(trajectory.turns[0].context_ids) == kept
        assert [asked[:40] for asked, _ in engine.asked] == [kept] * num_turns and engine.asked[0][0] == kept
        sample = to_batch([group])
        assert sample.token_ids[:40].tolist() == list(kept) and not any(sample.action_mask[:40])


@pytest.mark.parametrize("truncation", ["error", "drop"])
def test_otherwise_nothing_is_cut(truncation: str, chat: ChatTemplate) -> None:
    uncut = EpisodeRunner(Echoes(), ObservationTokenizer(chat, AskFormat(), 16), EpisodeLimits())
    assert truncating(DataConfig(max_prompt_length=40, truncation=truncation), uncut) is uncut


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(length: int) -> dict[str, Any]:
    prompt = [{"role": "user", "content": "very " * length}]
    return {"data_source": "mine", "prompt": prompt, "reward_model": {"ground_truth": "much"}}


def rows_of(length: int, truncation: str) -> DataConfig:
    return DataConfig(max_prompt_length=length, truncation=truncation, max_bad_share=0.2)


def test_each_policy_counts_what_it_does(chat: ChatTemplate, tmp_path: Path) -> None:
    data = str(write_jsonl(tmp_path / "rows.jsonl", [row(5), row(100), {}, row(6), row(200)]))

    def read(truncation: str) -> tuple[list[str], str]:
        tasks, report = read_tasks(data, chat.task_prompt_ids, rows_of(60, truncation))
        return [task.id for task in tasks], str(report)

    bad = "1 unreadable, row 2: has the columns none, which are no known layout"
    assert read("left") == (
        [f"rows.jsonl#{number}" for number in (0, 1, 3, 4)],
        f"rows.jsonl: 5 rows, 4 used (2 cut to the last 60 tokens), 1 dropped ({bad})",
    )
    assert read("drop") == (
        ["rows.jsonl#0", "rows.jsonl#3"],
        f"rows.jsonl: 5 rows, 2 used, 3 dropped (2 longer than 60 tokens; {bad})",
    )
    with pytest.raises(
        DataError, match=r"rows.jsonl, row 1: the prompt has \d+ tokens.* data.truncation=left or .*=drop"
    ):
        read("error")


def test_a_dropped_row_has_no_note(chat: ChatTemplate, tmp_path: Path) -> None:
    stranger = to_row(example(name="get_news"), "train", 0)
    data = str(write_jsonl(tmp_path / "rows.jsonl", [stranger, row(5)]))
    used, dropped = (str(read_tasks(data, chat.task_prompt_ids, rows_of(length, "drop"))[1]) for length in (1000, 60))
    assert used == "rows.jsonl: 2 rows, 2 used (1 with gold calls of unlisted tools, row 0), 0 dropped"
    assert dropped == "rows.jsonl: 2 rows, 1 used, 1 dropped (1 longer than 60 tokens)"


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for ToolRL's prompts."""
    model = save_tiny_model(tmp_path_factory.mktemp("model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    return model


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_toolrls_recipes_train_on_toolrls_rows(algorithm: str, roomy: Path, tmp_path: Path) -> None:
    """All 80 rows are used, the one whose gold calls a tool by half its name among them."""
    overrides = [
        *run_overrides(roomy, tmp_path, "hf", 3),
        f"data.train_files=[{real_data('toolrl', 'rlla_test.parquet')}]",
    ]
    overrides = [word for word in overrides if not word.startswith("rollout.n=")]
    preset = f"algorithm.name={'ppo' if algorithm == 'ppo' else 'toolrl_grpo'}"
    config = load_config([f"recipe=toolrl_{algorithm}", *overrides, preset, "data.max_prompt_length=300"])
    inputs = load_inputs(config)
    (report,) = inputs.reports
    assert (report.num_rows, report.num_used, len(report.unlisted)) == (80, 80, 1)
    assert report.notes == {"cut to the last 300 tokens": 80}
    prompt_ids = prompt_fn(inputs.episode_runner)
    assert {len(prompt_ids(task)) for task in inputs.train[0][:9]} == {300}
    assert read_lengths(config, inputs.episode_runner.chat, inputs.train, prompt_ids).prompt == 300
    with local_trainer(config) as trainer:
        for _ in range(3):
            metrics = asyncio.run(trainer.train_step()).metrics
            assert metrics["response_length/mean"] > 0.0 and metrics["reward/format"] >= 0.0


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_toolrls_scripts_train_smollm2_on_toolrls_rows(algorithm: str, tmp_path: Path) -> None:
    """Word for word as README.md has it, but for the sizes; prompts are as long as the recipe has them."""
    for split in ("train", "test"):
        (tmp_path / f"{split}.parquet").symlink_to(real_data("toolrl", "rlla_test.parquet"))
    overrides = [
        "data.train_batch_size=2",
        "actor.ppo_mini_batch_size=2",
        "data.max_response_length=8",
        "rollout.name=hf",
    ]
    overrides += ["data.val_files=[]", "trainer.val_before_train=false", "trainer.test_freq=0", "trainer.save_freq=0"]
    overrides += ["trainer.device=cpu", "trainer.total_training_steps=3", f"trainer.default_local_dir={tmp_path}"]
    done = subprocess.run(
        ["bash", f"train_{algorithm}.sh", *overrides],
        env={**os.environ, "BASE_MODEL": "smollm2", "DATA_DIR": str(tmp_path), "EXPERIMENT_NAME": "run"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    cut = {"grpo": "1 cut to the last 2048 tokens", "ppo": "17 cut to the last 1024 tokens"}[algorithm]
    assert f"train.parquet: 80 rows, 80 used ({cut}; 1 with gold calls of unlisted tools, row 9)" in done.stdout
    assert len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) >= 3


def test_generation_cuts_and_counts_too(roomy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", [row(300)])
    overrides = [
        f"model.path={roomy}",
        f"data.val_files=[{data}]",
        "rollout.name=hf",
        "trainer.device=cpu",
        "data.max_response_length=4",
    ]
    overrides += ["reward.name=search_r1", f"eval.output={tmp_path / 'out.jsonl'}", "data.max_prompt_length=64"]
    assert main_generation.main(overrides) == 2
    assert "rows.jsonl, row 0: the prompt has" in capfd.readouterr().out
    assert main_generation.main([*overrides, "data.truncation=left"]) == 0
    assert "rows.jsonl: 1 rows, 1 used (1 cut to the last 64 tokens), 0 dropped" in capfd.readouterr().out


@pytest.mark.parametrize(("truncation", "too_long"), [("left", 0), ("drop", 1)])
def test_a_probe_cuts_as_training_does_or_counts(truncation: str, too_long: int, roomy: Path, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", [row(300), row(5)])
    overrides = [
        "--probe",
        f"model.path={roomy}",
        f"data.train_files=[{data}]",
        "rollout.n=2",
        "rollout.name=hf",
        "trainer.device=cpu",
        "data.max_response_length=4",
    ]
    overrides += ["reward.name=search_r1", f"eval.output={tmp_path / 'out'}", "data.max_prompt_length=64"]
    assert main_eval.main([*overrides, f"data.truncation={truncation}"]) == 0
    (found,) = (json.loads(path.read_text()) for path in (tmp_path / "out").glob("*/probe.json"))
    assert (found["rows"], found["rows_too_long"]) == (2 - too_long, too_long)


def test_sft_counts_responses_that_are_too_long(chat: ChatTemplate, tmp_path: Path) -> None:
    def conversation(*lengths: int) -> dict[str, Any]:
        roles = ("user", "assistant") * (len(lengths) // 2)
        turns = zip(roles, lengths, strict=True)
        return {"messages": [{"role": role, "content": "very " * number} for role, number in turns]}

    rows = [conversation(2, 3), conversation(2, 300), conversation(2, 3, 2, 300), {"messages": []}]
    source = str(write_jsonl(tmp_path / "sft.jsonl", rows))
    report = RowReport(source)
    samples = sft.sft_samples(sft.read_demonstrations(source, 0.25, report), chat, 100, 0.25, report, first_group=7)
    assert [sample.group for sample in samples] == [7, 9]
    assert str(report) == (
        "sft.jsonl: 4 rows, 2 used (1 with responses dropped for being longer than 100 tokens), "
        "2 dropped (1 longer than 100 tokens; 1 with a bad messages, row 3: is empty)"
    )


def test_a_probe_takes_the_policy_of_the_recipe() -> None:
    config = load_config(["recipe=toolrl_ppo", "model.path=m", "data.train_files=[d]"], PROBE)
    assert (config.data.truncation, config.data.max_prompt_length) == ("left", 1024)
