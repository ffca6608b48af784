"""A command with OpenAI rows and a model alone: what it chooses by both, and what it validates on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.data.openai_rows import main as write_rows
from tests.support.tiny import MINI, save_tiny_model
from tests.verl.chat.test_chat import TEMPLATES
from tests.verl.data.test_conversations import row
from verl.build.env import with_tool_call_format
from verl.build.run import Inputs, load_chat_template, load_inputs
from verl.checkpoint.checkpoint import CheckpointStore
from verl.config.load import load_config
from verl.config.schema import Config
from verl.data.lengths import split_rows
from verl.data.rows import DATA_VERSIONS, version_of
from verl.data.tasks import TaskSet
from verl.errors import ConfigError, DataError
from verl.scoring.rewards import build_rewards
from verl.tracking.jsonl import read_jsonl
from verl.trainer import main_ppo
from verl.types import Message, Task


@pytest.fixture
def mine(tmp_path: Path) -> str:
    """32 of the embedded tasks, with 33 assistant turns or more."""
    path = str(tmp_path / "mine.jsonl")
    assert write_rows(["--input", "embedded:train.parquet", "--output", path, "--limit", "32"]) == 0
    return path


def inputs_of(*argv: str) -> tuple[Config, Inputs]:
    config = load_config([*argv, "trainer.device=cpu"])
    config = with_tool_call_format(config, load_chat_template(config.model))
    return config, load_inputs(config)


def test_the_embedded_tasks_as_openai_rows(mine: str) -> None:
    """Prompts and golds are those of the embedded rows, but for the names of types."""
    tasks, embedded = TaskSet(mine), TaskSet(str(MINI / "train.parquet"))
    config, inputs = inputs_of(f"data={mine}", "model=embedded")
    assert inputs.choices(config.env.tool_call_format) == (
        "reward: calls; tool-call format: toolrl; validation rows: none, data.val_files and data.val_share are not set"
    )
    chat, single = inputs.episode_runner.chat, tasks[0]
    observations = inputs.episode_runner.observations
    initial = inputs.episode_runner.envs.known_initial_observation(single)  # type: ignore[attr-defined]
    ours = chat.tokenizer.decode(observations.prompt_ids(initial))
    theirs = chat.tokenizer.decode(chat.prompt_ids(embedded[0].prompt))
    assert ours == theirs.replace('"str"', '"string"').replace('"int"', '"integer"')
    golds = {task.id.partition("#")[2].partition(".")[0]: task.answer for task in tasks}
    assert len(golds) == 32 and all(task.gold for task in tasks)


@pytest.mark.parametrize(("template", "style"), [("qwen2.5.jinja", "native"), (None, "toolrl")])
def test_the_format_is_the_models_own_if_its_template_lists_tools(
    template: str | None, style: str, tmp_path: Path
) -> None:
    folder = save_tiny_model(tmp_path)
    if template:
        (folder / "chat_template.jinja").write_text((TEMPLATES / template).read_text())
    config = load_config(["data=x", f"model={folder}"])
    assert with_tool_call_format(config, load_chat_template(config.model)).env.tool_call_format == style


def test_a_batch_of_more_prompts_than_tasks_is_an_error_with_a_hint(tmp_path: Path) -> None:
    path = tmp_path / "few.jsonl"
    path.write_text(json.dumps(row()))
    with pytest.raises(ConfigError, match=r"=16 exceeds the 2 tasks .*; set data.train_batch_size=2 actor.ppo_mini"):
        inputs_of(f"data={path}", "model=embedded")


def test_held_out_rows_keep_their_turns_together(mine: str) -> None:
    _, inputs = inputs_of(f"data={mine}", "model=embedded", "data.val_share=0.25")
    assert [*inputs.val] == ["mine"]
    (train,), (val,) = inputs.train, inputs.val.values()
    rows = [{task.id.partition("#")[2].partition(".")[0] for task in part} for part in (train, val)]
    assert (len(rows[0]), len(rows[1])) == (24, 8) and not rows[0] & rows[1]
    again = inputs_of(f"data={mine}", "model=embedded", "data.val_share=0.25")[1].val["mine"]
    assert [task.id for task in again] == [task.id for task in val]


@pytest.mark.parametrize("left_out", [{0}, {31}, {2, 9, 16, 30}, set(range(1, 31))])
def test_rows_that_give_no_task_hold_out_no_others(left_out: set[int]) -> None:
    tasks = [Task(f"mine.jsonl#{number}", (Message("user", "x"),), "", "s") for number in range(32)]

    def held_out(tasks: list[Task]) -> list[str]:
        rest, part = split_rows(tasks, 0.25, 3, num_rows=32)
        assert sorted(task.id for task in (*rest, *part)) == sorted(task.id for task in tasks) and rest and part
        return [task.id for task in part]

    kept = [task for number, task in enumerate(tasks) if number not in left_out]
    expected = [id for id in held_out(tasks) if int(id.partition("#")[2]) not in left_out]
    assert len(held_out(tasks)) == 8 and (held_out(kept) == expected or not expected)


def test_one_row_cannot_be_held_out(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(row()))
    with pytest.raises(DataError, match=r"data.val_share.*has one row"):
        split_rows(TaskSet(str(path)), 0.5, 0, 1)


def test_the_default_reward_follows_from_the_task(mine: str) -> None:
    rewards = build_rewards("auto")
    with_gold, without = TaskSet(mine)[0], TaskSet(str(MINI / "train.parquet"))[0]
    assert [type(rewards.of(task)).__name__ for task in (with_gold, without)] == ["CallsReward", "RllaReward"]
    assert [rewards.names(task) for task in (with_gold, without)] == [("calls",), ("rlla",)]


def test_rows_without_a_gold_turn_are_refused_by_a_reward_that_needs_one(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join([json.dumps(row(row()["messages"][:2]))] * 16))
    with pytest.raises(DataError, match=r"prompts.jsonl.* row.*'messages'.*assistant turn"):
        inputs_of(f"data={path}", "model=embedded", "reward.name=calls", "data.max_bad_share=0")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["reward.name=rlla"],
            "32 of 32 rows cannot be used.* not end with a turn in ToolRL's format.*reward.name=calls",
        ),
        (["reward=[{name: rlla}]"], "not end with a turn in ToolRL's format"),
        (["env.tool_call_format=native"], "data.prompt_template=mini; null is the format's own: .* no option"),
        (["env.tool_call_format=hermes"], "data.prompt_template=mini; null .* lacks the placeholder {question}"),
        (["data.map=mine.py"], r"unknown data.map 'mine.py'\. For your own, use"),
    ],
)
def test_choices_that_do_not_fit_the_rows_are_one_clear_error(overrides: list[str], message: str, mine: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        inputs_of(f"data={mine}", "model=embedded", *overrides)


def test_tool_rl_s_reward_takes_conversations_in_its_format(tmp_path: Path) -> None:
    path = tmp_path / "theirs.jsonl"
    gold = {"role": "assistant", "content": "<think> Rain. </think>\n<response> It rains. </response>"}
    path.write_text("\n".join([json.dumps({"messages": [{"role": "user", "content": "Rain?"}, gold]})] * 16))
    _, inputs = inputs_of(f"data={path}", "model=embedded", "reward.name=rlla")
    assert len(inputs.train[0]) == 16


@pytest.mark.slow
def test_the_command_trains_at_once(mine: str, tmp_path: Path) -> None:
    overrides = [f"data={mine}", "model=embedded", "trainer.total_training_steps=2", "trainer.device=cpu"]
    assert main_ppo.main([*overrides, f"trainer.default_local_dir={tmp_path}"]) == 0
    folder = tmp_path / "embedded"
    assert list(read_jsonl(folder / DATA_VERSIONS)) == [{"step": 0, **version_of(mine)}]
    assert CheckpointStore(folder / "checkpoints", 1, 1).latest() is not None
