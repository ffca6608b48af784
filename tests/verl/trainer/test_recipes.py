"""Every recipe in its smoke form: one process, a tiny model on the transformers engine, real tools, one training step.

Half of the episodes are the engine's own; the other half are written as the recipe's format and reward demand, so that
there is something to learn.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.local_run import local_trainer
from tests.support.tiny import save_tiny_model
from tests.toolrl.benchmarks.runner.eval_play import chat as chat_that_lists_tools
from tests.toolrl.sandbox.sandbox_host import need_bubblewrap
from toolrl.envs.shop.shop import ShopEnv, shop_tasks
from verl.chat.template import ChatTemplate
from verl.config.load import load_config
from verl.config.schema import Config
from verl.envs.base import Observation, StepResult
from verl.errors import ConfigError
from verl.formats.base import ToolCallFormat, build_tool_call_format
from verl.rollout.engine import RolloutEngine, Sampling
from verl.trainer.ppo import PPOTrainer, TrainStepResult
from verl.types import Completion, FinishReason, Message, Score, Task, ToolCall, ToolStatus
from verl.utils.reward_score.base import LabReward, build_reward

QUESTION, NUMBER = "What is 6 times 7?", "42"
CODE, SEARCH = ToolCall("python", {"code": "print(6 * 7)"}), ToolCall("search", {"query": "six times seven"})
CALLS = {
    "torl": CODE,
    "retool": CODE,
    "artist_math": CODE,
    "zerotir": CODE,
    "zerotir_ppo": CODE,
    "zerotir_pipeline": CODE,
    "retool_dapo": CODE,
    "otc_code": CODE,
    "otc_grpo": SEARCH,
    "otc_ppo": SEARCH,
    "search_r1": SEARCH,
    "search_r1_ppo": SEARCH,
    "artist_tools": ToolCall("list_products", {}),
    "tool_n1": None,
}
WITHOUT_GOLD = {
    "artist_math": f"<think>It was so.</think>\n<answer>\\boxed{{{NUMBER}}}</answer>",
    "artist_tools": "<think>Nothing is to be bought.</think>\nDone.",
}
N1_ANSWER = json.dumps([{"name": "get_time", "arguments": {"city": "Fese"}}])


class ErrandWithParts(ShopEnv):
    """The shop with one tool, to fit into a tiny model, judged in the parts that ARTIST's reward asks for."""

    async def reset(self) -> Observation:
        opening = await super().reset()
        return replace(opening, tools=tuple(tool for tool in opening.tools if tool.name == "list_products"))

    async def judge(self) -> Score:
        return Score(1.0, {"state": 1.0, "functions": 0.5})


class PaidErrand(ErrandWithParts):
    """Pays a quarter for every turn in which something was called."""

    async def step(self, message: Message) -> StepResult:
        return replace(await super().step(message), reward=0.25 * bool(message.tool_calls))


class HalfScripted:
    """Seeds that are even get a script's text, others the engine's own."""

    def __init__(self, engine: RolloutEngine, chat: ChatTemplate, texts: Sequence[str]) -> None:
        self._engine, self._chat, self._texts = engine, chat, texts
        self._turns: dict[tuple[int, ...], int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
        if sampling.n > 1:  # responses to one prompt
            own = await self._engine.generate(prompt_ids, sampling)
            return (self._completion(self._texts[-1]), *own[1:])
        turn, first = divmod(sampling.seed or 0, 1_000_003_007)
        if first % 2:
            return await self._engine.generate(prompt_ids, sampling)
        return (self._completion(self._texts[min(turn, len(self._texts) - 1)]),)

    def _completion(self, text: str) -> Completion:
        ids = (*self._chat.response_ids(text)[0], *(() if text is not self._texts[-1] else (self._chat.end_token_id,)))
        return Completion(ids, (-1.0,) * len(ids), FinishReason.STOP, 0)


def pieces(tool_call_format: ToolCallFormat, call: ToolCall) -> list[str]:
    """The call as an engine returns it, which stops at each stop string."""
    found: list[str] = []
    left = tool_call_format.render((call,))
    while left:
        stops = tool_call_format.stop_strings("".join(found))
        end = min((left.index(each) + len(each) for each in stops if each in left), default=len(left))
        found.append(left[:end])
        left = left[end:]
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a chat template that lists tools, as those of the recipes' models do."""
    folder = save_tiny_model(tmp_path_factory.mktemp("model"))
    chat_that_lists_tools().tokenizer.save_pretrained(folder)
    return folder


def rows(recipe: str) -> list[dict[str, Any]]:
    if recipe == "artist_tools":
        return [
            {
                "data_source": "shop",
                "prompt": [{"role": each.role, "content": each.content} for each in task.prompt],
                "reward_model": {"ground_truth": task.answer},
                "extra_info": dict(task.extra),
            }
            for task in shop_tasks(2)
        ]
    answer = N1_ANSWER if recipe == "tool_n1" else NUMBER
    row = {
        "data_source": "smoke",
        "prompt": [{"role": "user", "content": QUESTION}],
        "reward_model": {"ground_truth": answer},
    }
    return [row, row]


def smoke(recipe: str, model: Path, folder: Path, *more: str) -> Config:
    data, corpus = folder / "rows.jsonl", folder / "corpus.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows(recipe)))
    corpus.write_text(json.dumps({"id": "0", "contents": '"Six times seven"\nIt is 42.'}) + "\n")
    texts = [
        f"recipe={recipe}",
        f"model.path={model}",
        "model.compute_dtype=float32",
        "model.enable_gradient_checkpointing=false",
        f"data.train_files=[{data}]",
        "data.train_batch_size=2",
        "data.max_prompt_length=700",
        "data.max_response_length=200",
        "actor.ppo_mini_batch_size=2",
        "actor.max_tokens_per_pack=2000",
        "actor.optim.lr=1e-2",
        "actor.optim.warmup_steps=0",
        "rollout.name=hf",
        "rollout.n=2",
        "rollout.tensor_model_parallel_size=1",
        "trainer.device=cpu",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=1",
        "trainer.critic_warmup=0",
        "trainer.num_threads=1",
    ]
    if CALLS[recipe] is SEARCH:
        texts.append(f"env.tools=[{{name: search, corpus: {corpus}}}]")
    if CALLS[recipe] is not None:
        texts.append("env.max_turn_tokens=60")
    if recipe == "artist_tools":
        texts += [f"env.name={Path(__file__)}:ErrandWithParts", "eval.benchmarks=[]"]
    if recipe in ("otc_ppo", "retool", "search_r1_ppo"):
        texts.append("critic.optim.warmup_steps=0")
    return load_config([*texts, *more])


async def one_step(trainer: PPOTrainer) -> TrainStepResult:
    try:
        return await trainer.train_step()
    finally:
        await trainer.rollouts.close()


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["gigpo", "ppo", "grpo"])
def test_rewards_of_turns_train_or_are_refused(algorithm: str, model: Path, tmp_path: Path) -> None:
    paid = (f"env.name={Path(__file__)}:PaidErrand", f"algorithm.name={algorithm}", "algorithm.kl_placement=none")
    config = smoke("artist_tools", model, tmp_path, *paid)
    tool_call_format = build_tool_call_format(config.env.tool_call_format or "")
    texts = [tool_call_format.render((ToolCall("list_products", {}),)), WITHOUT_GOLD["artist_tools"]]

    with local_trainer(config) as trained:
        rollout = trained.rollouts.rollout
        object.__setattr__(rollout, "engine", HalfScripted(rollout.engine, rollout.episode_runner.chat, texts))
        if algorithm == "grpo":
            with pytest.raises(ConfigError, match=r"algorithm.name=grpo supports only one reward per episode"):
                asyncio.run(one_step(trained))
            return
        result = asyncio.run(one_step(trained))
    assert result.metrics["reward/turns"] > 0 and result.metrics["actor/grad_norm"] > 0
    assert result.batch.rewards is not None and 0.25 in result.batch.rewards


@pytest.mark.long
@pytest.mark.parametrize("recipe", CALLS)
def test_a_step_of_every_recipe(recipe: str, model: Path, tmp_path: Path) -> None:
    call = CALLS[recipe]
    if call is CODE:
        need_bubblewrap()
    config = smoke(recipe, model, tmp_path)
    reward = build_reward(config.reward.name, config.reward.options)
    answer = N1_ANSWER if recipe == "tool_n1" else NUMBER
    task = Task("t#0", (Message("user", QUESTION),), answer, "smoke")
    last = reward.gold(task, 0) if isinstance(reward, LabReward) else WITHOUT_GOLD[recipe]
    first = (
        []
        if call is None
        else pieces(
            build_tool_call_format(config.env.tool_call_format or "", config.env.tool_call_format_options), call
        )
    )

    with local_trainer(config) as trained:
        chat = trained.rollouts.rollout.episode_runner.chat
        engine = HalfScripted(trained.rollouts.rollout.engine, chat, [*first, last])
        object.__setattr__(trained.rollouts.rollout, "engine", engine)
        result = asyncio.run(one_step(trained))
    metrics = result.metrics
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["actor/grad_norm"] > 0
    scripted = [
        (trajectory, score)
        for group in result.groups
        for trajectory, score in zip(group.trajectories, group.scores, strict=True)
        if trajectory.turns[-1].completion.logprobs[0] == -1.0
    ]
    assert len(scripted) == 2 or config.algorithm.filters  # which draw until there is something to learn
    for trajectory, score in scripted:
        assert [use.status for use in trajectory.tool_uses] == [ToolStatus.SUCCESS] * (call is not None)
        others = [each.total for group in result.groups for each in group.scores]
        assert score.total == max(others) > min(others)
        if call is CODE or call is SEARCH:
            assert NUMBER in next(turn.responses[0].content for turn in trajectory.turns if turn.responses)
