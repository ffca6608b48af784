"""Every algorithm in its smoke form: one training step of a tiny model in one process, the way main_ppo goes."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.local_run import local_trainer
from tests.support.metric_names import known
from tests.support.tiny import run_overrides, save_tiny_model
from verl.algorithms import ALGORITHMS
from verl.batch.token_batch import TokenBatch
from verl.config.load import load_config
from verl.trainer.learner import Learned
from verl.trainer.metrics import Metrics
from verl.trainer.ppo import PPOTrainer

OWN = {"simpletir": ["algorithm.filters=[]"]}  # a tiny model ends hardly a response, so that all turns are void


def share_of_vowels(response: str, answer: str) -> float:
    """A reward under which hardly two responses are alike."""
    return sum(letter in "aeiou" for letter in response) / max(1, len(response))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    prompts = ({"data_source": "s", "prompt": [{"role": "user", "content": word}]} for word in ("One", "Two"))
    path.write_text("".join(json.dumps({**each, "reward_model": {"ground_truth": "x"}}) + "\n" for each in prompts))
    return path


def gain(trained: PPOTrainer, seen: TokenBatch) -> float:
    """By how much the update raised the sum of advantage times log-prob."""
    scored = trained.learner.policy.score(trained.learner.policy.shard_for_scoring(seen))
    assert seen.advantages is not None and seen.rollout_logprobs is not None
    return float((seen.advantages * (scored - seen.rollout_logprobs)).sum())


@pytest.mark.long
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_step_makes_better_responses_likelier(name: str, model: Path, rows: Path, tmp_path: Path) -> None:
    reward = f"reward.name={Path(__file__)}:share_of_vowels"
    overrides = [
        *run_overrides(model, tmp_path, "hf", 1),
        f"algorithm.name={name}",
        reward,
        f"data.train_files=[{rows}]",
    ]
    overrides += ["data.train_batch_size=2", "data.max_response_length=6", "rollout.n=4", "trainer.num_threads=1"]
    if name == "opd":
        overrides.append(f"teacher.path={save_tiny_model(tmp_path / 'teacher', seed=1)}")
    config = load_config([*overrides, *OWN.get(name, [])])
    seen: list[TokenBatch] = []

    async def step(trained: PPOTrainer) -> Metrics:
        plain = trained.learner.learn

        def watched(*given: Any) -> Learned:
            learned = plain(*given)
            seen.append(learned.batch)  # with the advantages that the update estimated
            return learned

        trained.learner.learn = watched  # type: ignore[method-assign]
        try:
            return (await trained.train_step()).metrics
        finally:
            await trained.rollouts.close()

    with local_trainer(config) as trained:
        metrics = asyncio.run(step(trained))
        assert gain(trained, seen[0]) > 0
    assert all(math.isfinite(value) and known(key) for key, value in metrics.items())
    assert metrics["actor/grad_norm"] > 0
    assert ("filter/kept" in metrics) == bool(trained.learner.algorithm.filters)
    made = trained.learner.algorithm
    assert ("actor/selected_fraction" in metrics) == (made.selection is not None or made.likelihood is not None)
