"""Every algorithm raises the reward of the embedded model, run with its preset, in this process.

Eight composed tasks that ask for several calls, of which the start model mostly makes the first alone, are trained on
for four steps of eight responses each, under ToolRL's reward. Before and after, 16 other responses to each of the same
prompts are sampled with the same seeds. GRPO is a long test, the others are slow. With `--log-cli-level=INFO` each
algorithm logs its result.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.local_run import local_trainer
from tests.support.tiny import MINI, run_overrides
from verl.algorithms import ALGORITHMS
from verl.algorithms.losses.policy_loss import policy_gradient
from verl.build.algorithm import build_algorithm
from verl.config.load import load_config
from verl.config.schema import AlgorithmConfig
from verl.trainer.ppo import PPOTrainer

PROMPTS, STEPS, LONGEST = 8, 4, 96
COMPOSED, KINDS = MINI / "composed", ("multiple", "parallel")
# An untrained policy gains 0.2 (standard deviation) from one set of seeds to another, one that is trained with the
# rewards of the previous step 1.3.
LEAST_GAIN = 1.5
_CRITIC = ["critic.optim.lr=1e-3", "critic.optim.weight_decay=0"]
OWN = {
    "ppo": _CRITIC,
    # Its lambda is for responses of thousands of tokens: of 20 and fewer it is 0, and a new critic knows nothing yet.
    "vapo": [*_CRITIC, "algorithm.options.length_alpha=1"],
    "raft_pp": ["algorithm.options.threshold=3"],  # of 4: a response that makes one of two calls is not right
    # Of eight responses two are mostly equal best, and then none has an advantage; pairs show more of fewer responses.
    "pass_at_k": ["rollout.n=2", "trainer.total_training_steps=8"],
}
_log = logging.getLogger(__name__)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first training rows whose gold response makes several calls."""
    table = pq.read_table(COMPOSED / "train.parquet")
    chosen = [row for row, kind in enumerate(table["data_source"].to_pylist()) if kind in KINDS][:PROMPTS]
    path = tmp_path_factory.mktemp("rows") / "rows.parquet"
    pq.write_table(table.take(chosen), path)
    return path


def overrides_of(name: str, rows: Path, out: Path) -> list[str]:
    """Two updates a step, so that ratios move and clips are felt; one where the loss corrects for nothing."""
    updates = 1 if build_algorithm(AlgorithmConfig(name=name), LONGEST, 0).policy_loss is policy_gradient else 2
    return [
        *run_overrides(COMPOSED / "model", out, "hf", STEPS),
        f"algorithm.name={name}",
        f"data.train_files=[{rows}]",
        f"data.train_batch_size={PROMPTS}",
        f"data.max_response_length={LONGEST}",
        "rollout.n=8",
        f"actor.ppo_mini_batch_size={PROMPTS // updates}",
        "actor.optim.lr=5e-4",
        "actor.optim.weight_decay=0",
        "trainer.num_threads=1",
    ]


async def sampled_rewards(trained: PPOTrainer) -> list[float]:
    """The mean reward of 16 responses to each prompt, always with the same seeds, which no training has."""
    stream, rollout = trained.rollouts.tasks, trained.rollouts.rollout
    tasks = [stream.at([number]) for number in range(PROMPTS)]
    groups = [await rollout.run(task, 16, 0, first_seed=10**6 + 16 * row) for row, task in enumerate(tasks)]
    return [statistics.fmean(score.total for score in group.scores) for group in groups]


async def rewards_after(trained: PPOTrainer, steps: int) -> list[float]:
    """Those of the policy that so many steps make."""
    for _ in range(steps):
        await trained.train_step()
    rewards = await sampled_rewards(trained)
    await trained.rollouts.close()
    return rewards


@pytest.fixture(scope="module")
def before(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The start model's rewards, which are the same for every algorithm."""
    with local_trainer(load_config(overrides_of("gpg", rows, tmp_path_factory.mktemp("untrained")))) as untrained:
        return asyncio.run(rewards_after(untrained, 0))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name == "grpo" else pytest.mark.slow)
        for name in ALGORITHMS
        if name != "opd"  # which learns from no reward
    ],
)
def test_every_algorithm_raises_the_embedded_models_reward(
    name: str, rows: Path, before: list[float], tmp_path: Path
) -> None:
    config = load_config([*overrides_of(name, rows, tmp_path), *OWN.get(name, [])])
    assert config.trainer.total_training_steps is not None
    began = time.process_time()
    with local_trainer(config) as trained:
        after = asyncio.run(rewards_after(trained, config.trainer.total_training_steps))
    gains = [new - old for old, new in zip(before, after, strict=True)]
    gain, error = statistics.fmean(gains), statistics.stdev(gains) / PROMPTS**0.5
    means, seconds = (statistics.fmean(before), statistics.fmean(after)), time.process_time() - began
    _log.info("| %s | %.2f | %.2f | %+.2f | %.2f | %.0f |", name, *means, gain, error, seconds)
    assert gain > LEAST_GAIN
