"""Every algorithm teaches a tiny model in this process to say words with an even number, half of them at first."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest

from tests.test_train_step import one_rank, trainer, value_model  # noqa: F401  a fixture of the module
from verl.algorithms import ALGORITHMS
from verl.config.schema import AlgorithmConfig
from verl.trainer.build_algorithm import build_algorithm
from verl.trainer.collection import NoSignalError


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_raises_the_reward(name: str) -> None:
    algorithm = replace(build_algorithm(AlgorithmConfig(name), 4, 0), overlong=None)
    critic = value_model() if algorithm.needs_critic else None
    learning = trainer(algorithm, minibatches=2, critic=critic)
    rewards: list[float] = []
    with suppress(NoSignalError):  # it may learn all there is, and then filters leave nothing
        rewards.extend(asyncio.run(learning.train_step())["reward/total"] for _ in range(16))
    assert max(rewards[-3:]) > 0.75 > 0.65 > rewards[0]
