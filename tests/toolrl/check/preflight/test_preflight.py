"""Preflight finds what would fail later; validation counts what it should; the scripted engine writes its lines."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import stdev

import pytest
from rich.console import Console
from transformers import AutoConfig, Gemma3TextConfig, LlamaConfig, PretrainedConfig, Qwen3Config

from tests.support.tiny import MINI, run_overrides, with_heads
from toolrl.check.plan.plan import Lengths, build_plan, find_hardware, read_lengths
from toolrl.check.preflight.preflight import check_lengths, check_memory, check_reward, check_step, preflight
from toolrl.check.preflight.scripted_engine import ScriptedEngine
from verl.build.env import single_turn_runner
from verl.build.run import load_chat_template, load_inputs
from verl.config.load import load_config
from verl.config.schema import ModelConfig
from verl.data.tasks import TaskSet
from verl.episodes.group import GroupRollout
from verl.errors import ConfigError
from verl.rollout.engine import Sampling
from verl.scoring.pool import DirectScorer
from verl.scoring.rewards import Rewards, build_rewards
from verl.tracking.console import Display
from verl.trainer.main_ppo import train
from verl.trainer.metrics import score_means
from verl.trainer.validate import Validator
from verl.types import Completion, FinishReason, Score, Task, Trajectory
from verl.utils.reward_score.base import EnvReward
from verl.workers.parity import small_copy

REWARD = build_rewards("rlla")


@pytest.mark.long
def test_preflight_of_the_embedded_tasks(model: Path, tmp_path: Path) -> None:
    console = Console(width=200, record=True, quiet=False, file=(tmp_path / "output").open("w"))
    config = load_config([*run_overrides(model, tmp_path, "hf", steps=1), "data.max_response_length=128"])
    inputs = load_inputs(config)
    plan = build_plan(
        config,
        read_lengths(config, inputs.episode_runner.chat, inputs.train, inputs.episode_runner.chat.task_prompt_ids),
        find_hardware(config, "cpu"),
    )
    preflight(config, inputs, plan, console)
    output = console.export_text()
    assert (
        "20 golden responses, the longest has" in output
        and "0 violations" in output
        and "one update on a tiny qwen2" in output
    )
    assert "4 prompts x 2 rollouts" in output and "0.1M parameters" in output and "GiB per trainer rank" in output


@pytest.mark.long
def test_the_python_api_works_under_a_running_event_loop(model: Path, tmp_path: Path) -> None:
    """In a notebook's cell."""
    console = Console(width=200, file=(tmp_path / "output").open("w"))
    config = load_config([*run_overrides(model, tmp_path, "hf", steps=1), "data.max_response_length=128"])

    async def cell() -> None:
        train(config, Display(None, console), only_preflight=True)

    asyncio.run(cell())
    assert "one update on a tiny qwen2" in (tmp_path / "output").read_text()


@pytest.mark.long
@pytest.mark.parametrize(
    "shape",
    [
        Qwen3Config(vocab_size=1024, hidden_size=512, num_hidden_layers=6, num_attention_heads=8, head_dim=64),
        LlamaConfig(
            vocab_size=1024, hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3
        ),
        Gemma3TextConfig(vocab_size=1024, head_dim=64, sliding_window=32),
    ],
    ids=["qwen3", "llama", "gemma3"],
)
def test_other_architectures_take_their_trial_step(shape: PretrainedConfig, model: Path, tmp_path: Path) -> None:
    config = load_config([*run_overrides(model, tmp_path, "hf", steps=1), "data.max_response_length=128"])
    tasks = TaskSet(str(MINI / "train.parquet"))[:4]
    result = check_step(
        small_copy(shape), load_chat_template(ModelConfig(path=str(model))), build_rewards("rlla"), tasks, config
    )
    assert "sum of advantage * log p" in result


def test_a_run_that_no_gpu_holds_is_found_before_it_starts(model: Path, tmp_path: Path) -> None:
    overrides = [*run_overrides(model, tmp_path, "vllm", steps=1), "rollout.gpu_memory_utilization=1.0"]
    config = load_config([word for word in overrides if word != "trainer.device=cpu"])
    plan = build_plan(config, Lengths(200, 60, "given"), find_hardware(config, "a100"))
    with pytest.raises(
        ConfigError, match=r"rollout needs .* of 79.2 GiB. .* Set rollout.gpu_memory_utilization=0.8"
    ) as e:
        check_memory(plan)
    assert "tokens at most, fits on one a100 without context parallelism" in str(e.value)


def test_heads_that_the_engine_does_not_compute_are_found(model: Path, tmp_path: Path) -> None:
    """vLLM's CPU build would start, and fail at the first request."""
    (other := tmp_path / "model").mkdir()
    config = load_config(run_overrides(with_heads(model, 48, other), tmp_path, "vllm", steps=1))
    with pytest.raises(ConfigError, match=r"model.path: attention heads of size 48 are not supported"):
        train(config, Display(None, Console(quiet=True)), only_preflight=True)


class Indifferent:
    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        return Score(1.0, {})


def test_a_reward_that_scores_all_responses_alike_is_found(model: Path, tmp_path: Path) -> None:
    config = load_config([*run_overrides(model, tmp_path, "hf", steps=1), "data.max_response_length=128"])
    tasks = TaskSet(str(MINI / "train.parquet"))[:4]
    shape, chat = AutoConfig.from_pretrained(model), load_chat_template(ModelConfig(path=str(model)))
    with pytest.raises(ConfigError, match="all advantages are zero"):
        check_step(small_copy(shape), chat, Rewards(Indifferent()), tasks, config)
    assert (
        check_reward(single_turn_runner(chat, 128), Rewards(Indifferent()), tasks) == "has no golden responses to try"
    )


def test_only_golden_responses_are_called_so(model: Path) -> None:
    """Where the environment judges, answers are placeholders; with other rewards they may be responses."""
    chat, tasks = load_chat_template(ModelConfig(path=str(model))), TaskSet(str(MINI / "train.parquet"))[:4]
    observations = single_turn_runner(chat, 999).observations
    assert check_lengths(observations, REWARD, tasks, 999).startswith("4 golden responses, the longest")
    assert check_lengths(observations, Rewards(Indifferent()), tasks, 999).startswith("4 answers, the longest")
    env = Rewards(EnvReward())
    result = check_lengths(observations, env, [replace(task, answer="-") for task in tasks], 1)
    assert result == "skipped: the environment judges, so there are no golden responses"


def test_too_little_room_for_responses_is_found(model: Path) -> None:
    chat = load_chat_template(ModelConfig(path=str(model)))
    with pytest.raises(ConfigError, match=r"4 of 4 golden responses exceed data\.max_response_length=16"):
        check_lengths(single_turn_runner(chat, 16).observations, REWARD, TaskSet(str(MINI / "train.parquet"))[:4], 16)


def test_validation_counts_totals_parts_and_exact_responses(model: Path) -> None:
    chat, reward = load_chat_template(ModelConfig(path=str(model))), build_rewards("rlla")
    tasks = TaskSet(str(MINI / "test.parquet"))[:4]
    golden = {chat.prompt_ids(task.prompt): task.answer for task in tasks[:3]}

    def script(prompt_ids: Sequence[int], number: int) -> Sequence[int]:
        text = golden.get(tuple(prompt_ids), "no idea")
        return (*chat.response_ids(text)[0], chat.end_token_id)

    rollout = GroupRollout(ScriptedEngine(script), DirectScorer(reward), Sampling(400), single_turn_runner(chat, 400))
    validator = Validator({"test": tasks}, rollout, reward)
    found = validated(validator)
    rows = list(validator.rows(asyncio.run(validator.rollouts(7)), 7))
    assert [(row["step"], row["set"], row["task_id"], row["exact"]) for row in rows] == [
        (7, "test", task.id, exact) for task, exact in zip(tasks, (1.0, 1.0, 1.0, 0.0), strict=True)
    ]
    maxima = [reward.maximum(task, 0) for task in tasks[:3]]
    assert found["val/test/exact"] == 0.75 and found["val/test/format"] == 0.75
    assert found["val/test/exact_stderr"] == 0.25  # of 1, 1, 1, 0: sqrt(0.75 / 3) / sqrt(4)
    silent = validated(Validator({"test": tasks[3:]}, rollout, reward))["val/test/total"]
    assert found["val/test/total"] == pytest.approx((sum(maxima) + silent) / 4) and silent < 0
    assert found["val/test/total_stderr"] == pytest.approx(stdev([*maxima, silent]) / 2)


def test_validation_averages_several_responses_to_a_task(model: Path) -> None:
    chat, rewards = load_chat_template(ModelConfig(path=str(model))), build_rewards("rlla")
    (task,) = TaskSet(str(MINI / "test.parquet"))[:1]
    asked: list[Sampling] = []

    class Sampled(ScriptedEngine):
        async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
            asked.append(sampling)
            return await super().generate(prompt_ids, sampling)

    def script(prompt_ids: Sequence[int], number: int) -> Sequence[int]:
        return (*chat.response_ids(task.answer if number == 0 else "no idea")[0], chat.end_token_id)

    rollout = GroupRollout(
        Sampled(script),
        DirectScorer(rewards),
        Sampling(400, temperature=1.0, top_p=0.6),
        single_turn_runner(chat, 400),
    )
    validator = Validator({"test": [task, task]}, rollout, rewards, n=4, seed=2)
    found = validated(validator)
    assert found["val/test/exact"] == 0.25
    assert found["val/test/exact_stderr"] == found["val/test/total_stderr"] == 0.0  # both tasks have the same mean
    assert [(each.n, each.top_p, each.seed) for each in asked] == [(4, 0.6, 2 << 40), (4, 0.6, (2 << 40) + 4)]
    assert validator.greedy.sampling == Sampling(400, temperature=0.0)


def test_the_scripted_engine_cuts_at_the_limit() -> None:
    engine = ScriptedEngine(lambda prompt, number: [number, 7, 7])
    one, two = asyncio.run(engine.generate([1], Sampling(2, n=2)))
    assert (one.token_ids, two.token_ids) == ((0, 7), (1, 7)) and one.finish_reason is FinishReason.LENGTH


def test_a_part_that_a_score_lacks_counts_as_none_of_it() -> None:
    """Else the success of episodes that were judged would pass for that of all."""
    scores = [Score(1.0, {"success": 1.0}), Score(0.0, {"success": 0.0}), Score(0.0, {"unfinished": 1.0})]
    assert score_means([*scores, scores[-1]]) == {"total": 0.25, "success": 0.25, "unfinished": 0.5}
    assert score_means([]) == {}


def validated(validator: Validator) -> dict[str, float]:
    return validator.metrics(asyncio.run(validator.rollouts(0)), 0)
