"""Published scripts, argument for argument, train two steps on rows as their own preprocessing writes them.

One process, a tiny model on the transformers engine, real tools. Paths to the model and the data, and sizes for two CPU
cores, are all that is added; and a corpus for `search` in place of a retriever. Half of the episodes are the engine's
own; the others give what the reward asks for.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.local_run import local_trainer
from tests.support.tiny import MINI, save_tiny_model
from tests.toolrl.benchmarks.runner.eval_play import chat as chat_that_lists_tools
from tests.toolrl.sandbox.sandbox_host import need_bubblewrap
from tests.toolrl.swe.repositories import HIDDEN, git, patch, pytest_environment, with_history
from tests.toolrl.swe.test_swe_tasks import GYM
from tests.verl.trainer.test_recipes import CODE, SEARCH, HalfScripted, pieces
from tests.verl.verl_compat.test_published import SCRIPTS
from verl.config.load import load_config
from verl.data.rows import read_rows
from verl.formats.base import build_tool_call_format
from verl.trainer.ppo import PPOTrainer, TrainStepResult
from verl.types import ToolStatus

pytestmark = pytest.mark.slow
QUESTION, NUMBER = "What is 6 times 7?", "42"
CALLS = json.dumps([{"name": "get_time", "arguments": {"city": "Fes"}}])
ASKED = {"role": "user", "content": QUESTION}
TOOLRL = next(iter(read_rows(str(MINI / "train.parquet"))))  # in the layout of ToolRL's preprocess_rlla


def published_rows(source: str, truth: Any, *prompt: dict[str, str], **extra: Any) -> list[dict[str, Any]]:
    """Two rows in veRL's layout, as the preprocessing scripts of its forks write them."""
    return [
        {
            "data_source": source,
            "prompt": list(prompt) or [ASKED],
            "ability": "any",
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"split": "train", "index": number, **extra},
        }
        for number in range(2)
    ]


SYSTEM = {"role": "system", "content": "Answer in a box."}
ROWS = {
    "ToolRL grpo": [TOOLRL, TOOLRL],
    "ToolRL ppo": [TOOLRL, TOOLRL],
    "Tool-N1": published_rows("toolcall", CALLS, prompt_type="qwen"),
    "ToRL": published_rows("math500", NUMBER, SYSTEM, ASKED, id="0"),
    "ReTool dapo": published_rows("math_dapo", NUMBER),
    "ReTool ppo": published_rows("math_dapo", NUMBER),
    "SearchR1 grpo": published_rows("nq", {"target": ["forty-two", NUMBER]}),
    "SearchR1 ppo": published_rows("hotpotqa", {"target": [NUMBER]}),
    "SearchR1 v0.3 fmt": published_rows("nq", {"target": [NUMBER]}),
}
TOOLS = {"ToRL": CODE, "ReTool dapo": CODE, "ReTool ppo": CODE, **dict.fromkeys(list(ROWS)[-3:], SEARCH)}
ANSWERS = {
    "Tool-N1": f"<think>a</think><tool_call>{CALLS}</tool_call>",
    **dict.fromkeys(("ToRL", "ReTool dapo", "ReTool ppo"), f"So it is \\boxed{{{NUMBER}}}."),
    **dict.fromkeys(list(ROWS)[-3:], f"<think>a</think><answer>{NUMBER}</answer>"),
}
SIZES = [
    "model.compute_dtype=float32",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2000",
    "actor_rollout_ref.actor.optim.lr=1e-2",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.0",
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "trainer.device=cpu",
    "trainer.n_gpus_per_node=1",
    "trainer.nnodes=1",
    "trainer.num_threads=1",
    "trainer.logger=[console]",
    "trainer.total_training_steps=2",
    "trainer.critic_warmup=0",
    "data.val_files=[]",
    "trainer.test_freq=0",
]
CRITIC = ["critic.ppo_mini_batch_size=2", "critic.optim.lr_warmup_steps_ratio=0.0"]  # where the script sets them
# The script's own keys of what is smaller here.
NUM_RESPONSES = {"SearchR1 grpo": "n_agent", "SearchR1 v0.3 fmt": "n_agent", "SkyRL 8b": "n_trajectories"}
LENGTHS = {
    "SearchR1": ["data.max_start_length=500", "data.max_prompt_length=300", "data.max_response_length=60"],
    "SkyRL": [
        "data.max_prompt_length=7000",
        "data.max_response_length=100",
        "+actor_rollout_ref.rollout.max_starting_message_length=6000",
        "actor_rollout_ref.rollout.max_iterations=3",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=7100",
    ],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a chat template that lists tools, and room for long prompts."""
    folder = save_tiny_model(tmp_path_factory.mktemp("model"))
    chat_that_lists_tools().tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    return folder


def arguments(script: str, model: Path, folder: Path, rows: Sequence[dict[str, Any]]) -> list[str]:
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [
        *SCRIPTS[script]["overrides"],
        *SIZES,
        f"data.train_files=[{data}]",
        f"actor_rollout_ref.model.path={model}",
    ]
    if any(each.startswith("critic.model.path=") for each in given):
        given.append(f"critic.model.path={model}")
    keys = {each.partition("=")[0] for each in given}
    given += [each for each in CRITIC if each.partition("=")[0] in keys]
    if script in NUM_RESPONSES:
        given.append(f"actor_rollout_ref.rollout.{NUM_RESPONSES[script]}=2")
    else:
        given.append("actor_rollout_ref.rollout.n=2")
    system = next((name for name in LENGTHS if script.startswith(name)), None)
    given += LENGTHS[system] if system else ["data.max_prompt_length=700", "data.max_response_length=200"]
    return [*given, f"trainer.default_local_dir={folder}"]


async def two_steps(trainer: PPOTrainer) -> list[TrainStepResult]:
    try:
        return [await trainer.train_step(), await trainer.train_step()]
    finally:
        await trainer.rollouts.close()


@pytest.mark.parametrize("script", ROWS)
def test_two_steps_of_a_published_script(script: str, model: Path, tmp_path: Path) -> None:
    call = TOOLS.get(script)
    if call is CODE:
        need_bubblewrap()
    given = arguments(script, model, tmp_path, ROWS[script])
    if call is SEARCH:
        corpus = tmp_path / "corpus.jsonl"
        corpus.write_text(json.dumps({"id": "0", "contents": '"Six times seven"\nIt is 42.'}) + "\n")
        given.append(f"env.tools=[{{name: search, corpus: {corpus}}}]")
    config = load_config([*given, *(["env.max_turn_tokens=60"] if call is CODE else [])])
    answer = ANSWERS.get(script, TOOLRL["reward_model"]["ground_truth"])
    style = build_tool_call_format(config.env.tool_call_format, {}) if config.env.tool_call_format else None
    first = pieces(style, call) if style is not None and call is not None else []

    with local_trainer(config) as trained:
        rollout = trained.rollouts.rollout
        engine = HalfScripted(rollout.engine, rollout.episode_runner.chat, [*first, answer])
        object.__setattr__(rollout, "engine", engine)
        results = asyncio.run(two_steps(trained))
    for result in results:
        assert all(math.isfinite(value) for value in result.metrics.values())
        assert result.metrics["actor/grad_norm"] > 0
        scored = [pair for group in result.groups for pair in zip(group.trajectories, group.scores, strict=True)]
        scripted = [pair for pair in scored if pair[0].turns[-1].completion.logprobs[0] == -1.0]
        assert len(scripted) >= 2
        for trajectory, score in scripted:
            assert [use.status for use in trajectory.tool_uses] == [ToolStatus.SUCCESS] * (call is not None)
            assert score.total == max(each.total for _, each in scored)
        assert max(each.total for _, each in scored) > min(each.total for _, each in scored)


def test_two_steps_of_skyrls_script(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows carry the instance, from which the environment makes its own prompt; hidden tests judge."""
    need_bubblewrap()
    repository = with_history(tmp_path / "calc")
    instance = GYM | {
        "repository": str(repository),
        "base_commit": git(repository, "rev-parse", "HEAD").strip(),
        "test_patch": patch(HIDDEN),
        "environment": pytest_environment(tmp_path),
    }
    row = {"data_source": "swe-gym", "prompt": [ASKED], "ability": "coding", "instance": instance}
    config = load_config(arguments("SkyRL 8b", model, tmp_path, [row, row]))
    assert (config.env.name, config.reward.name, config.env.max_tool_calls) == ("swe", "env", 3)
    monkeypatch.chdir(tmp_path)  # which has the environment
    with local_trainer(config) as trained:
        results = asyncio.run(two_steps(trained))
    for result in results:
        assert {score.total for group in result.groups for score in group.scores} <= {0.0, 1.0}
        assert sum(len(group.scores) for group in result.groups) == 4
