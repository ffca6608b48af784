"""Ten dialogues in OpenAI's form, as users have them: taught as demonstrations, and trained on as prompts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.local_run import local_trainer
from tests.support.tiny import run_overrides, save_tiny_model
from tests.verl.chat.test_chat import TEMPLATES
from tests.verl.sft.test_sft_run import group_ends, run  # noqa: F401  a fixture
from verl.build.run import load_chat_template
from verl.config.load import load_config
from verl.config.schema import ModelConfig
from verl.sft.demonstrations import read_demonstrations, sft_samples
from verl.tracking.jsonl import read_jsonl
from verl.trainer import main_ppo, main_sft
from verl.trainer.ppo import PPOTrainer, TrainStepResult

CITIES = ("Rome", "Bonn", "Lima", "Oslo", "Bern", "Cairo", "Delhi", "Quito", "Seoul", "Turin")
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["C", "F"]}},
            "required": ["city"],
        },
    },
}


def dialogue(number: int, city: str) -> list[dict[str, Any]]:
    """A question, a call, its result and an answer."""
    arguments = json.dumps({"city": city, "unit": "C"})
    call = {"id": f"call_{number}", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return [
        {"role": "system", "content": "You help with the weather."},
        {"role": "user", "content": f"How warm is it in {city}?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"call_{number}", "content": f'{{"degrees": {number + 10}}}'},
        {"role": "assistant", "content": f"It is {number + 10} degrees in {city}."},
    ]


DIALOGUES = [dialogue(number, city) for number, city in enumerate(CITIES)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a chat template that has tools, calls and results."""
    folder = save_tiny_model(tmp_path_factory.mktemp("model"))
    (folder / "chat_template.jinja").write_text((TEMPLATES / "qwen2.5.jinja").read_text())
    return folder


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "demonstrations.jsonl"
    path.write_text("".join(json.dumps({"messages": each, "tools": [WEATHER]}) + "\n" for each in DIALOGUES))
    return path


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same dialogues up to the answer, which the policy gives; each names its reward."""
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    reward = path.with_name("share.py")
    reward.write_text("def share(response, answer):\n    return len(set(response) & set(answer)) / len(set(answer))\n")
    rows = [
        {
            "data_source": "weather",
            "prompt": each[:-1],
            "tools": [WEATHER],
            "reward_model": {"ground_truth": each[-1]["content"]},
            "reward": f"{reward}:share",
        }
        for each in DIALOGUES
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


HEAD = (
    "<|im_start|>system\nYou help with the weather.\n\n# Tools\n\n<tools>\n"
    + json.dumps(WEATHER)
    + "\n</tools><|im_end|>\n<|im_start|>user\nHow warm is it in {city}?<|im_end|>\n<|im_start|>assistant\n"
)
CALL = '<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{city}", "unit": "C"}}}}\n</tool_call><|im_end|>'
RESULT = '\n<|im_start|>user\n<tool_response>\n{{"degrees": {degrees}}}\n</tool_response><|im_end|>\n'


def rendered(number: int) -> str:
    """The prompt of a row, as Qwen2.5's template writes it."""
    head = HEAD.replace("{city}", CITIES[number])
    call = CALL.format(city=CITIES[number])
    return head + call + RESULT.format(degrees=number + 10) + "<|im_start|>assistant\n"


def test_demonstrations_teach_the_calls(model: Path, demonstrations: Path, tmp_path: Path) -> None:
    tool_call_format = load_chat_template(ModelConfig(path=str(model)))
    samples = sft_samples(read_demonstrations(str(demonstrations)), tool_call_format, 512)
    assert len(samples) == 20  # a call and an answer of each
    trained = [
        tool_call_format.tokenizer.decode(
            [token for token, own in zip(each.token_ids, each.action_mask, strict=True) if own]
        )
        for each in samples
    ]
    assert trained[0] == CALL.format(city="Rome") and trained[1] == "It is 10 degrees in Rome.<|im_end|>"
    heads = [
        tool_call_format.tokenizer.decode(
            [token for token, own in zip(each.token_ids, each.action_mask, strict=True) if not own]
        )
        for each in samples
    ]
    assert heads[0] == HEAD.replace("{city}", "Rome") and heads[1] == rendered(0)
    run(model, samples, tmp_path, steps=8)
    losses = [row["actor/loss"] for row in read_jsonl(tmp_path / "metrics.jsonl")[1:]]
    assert losses[-1] < 0.8 * losses[0]


def test_the_same_dialogues_are_prompts_of_grpo(model: Path, prompts: Path, tmp_path: Path) -> None:
    overrides = [*run_overrides(model, tmp_path, "hf", 2), f"data.train_files=[{prompts}]"]
    config = load_config([*overrides, "reward.name=math", "data.user_code=true"])

    async def train(trained: PPOTrainer) -> TrainStepResult:
        await trained.weight_sync.sync(0)
        try:
            await trained.train_step()
            return await trained.train_step()
        finally:
            await trained.rollouts.close()

    with local_trainer(config) as trained:
        last = asyncio.run(train(trained))
        decode = trained.rollouts.rollout.episode_runner.chat.tokenizer.decode
        assert len(last.groups) == 4
        for group in last.groups:
            number = int(group.task.id.rpartition("#")[2])
            assert {decode(each.turns[0].context_ids) for each in group.trajectories} == {rendered(number)}
            for trajectory, score in zip(group.trajectories, group.scores, strict=True):
                written, wanted = set(trajectory.response), set(group.task.answer)
                assert score.total == len(written & wanted) / len(wanted)  # the row's reward, not the run's


@pytest.mark.slow
def test_the_commands_do_both(model: Path, demonstrations: Path, prompts: Path, tmp_path: Path) -> None:
    trainer = [f"trainer.default_local_dir={tmp_path}", "trainer.device=cpu", "trainer.total_training_steps=2"]
    sft = [f"model.path={model}", "model.compute_dtype=float32", f"data.train_files=[{demonstrations}]"]
    assert main_sft.main([*sft, *trainer, "data.train_batch_size=4", "trainer.experiment_name=sft"]) == 0
    overrides = [*run_overrides(model, tmp_path, "hf", 2), f"data.train_files=[{prompts}]"]
    assert main_ppo.main([*overrides, "reward.name=math", "data.user_code=true", "rollout.n=2"]) == 0
    (first, *_) = read_jsonl(tmp_path / "run" / "transcripts" / "step-000001.jsonl")
    assert first["tools"] == ["get_weather"] and first["prompt"][2]["tool_calls"][0]["name"] == "get_weather"
