"""The terms of the policy's loss by hand, and the temperature of the log-probs that enter it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.verl.batch.test_packing import random_samples
from verl.algorithms.algorithm import KLTerm
from verl.algorithms.estimators.grpo import GRPO
from verl.algorithms.names import KLPlacement
from verl.batch.experience import policy_minibatch
from verl.batch.packed import PackedBatch
from verl.batch.packing import Shard, make_units
from verl.batch.samples import batch_of
from verl.workers.model import PolicyOutput
from verl.workers.policy_worker import PolicyWorker, policy_loss

PLAIN = replace(GRPO, kl=KLTerm())
PLACES = torch.arange(2)


@dataclass
class Known:
    """In place of a model: known log-probs, each with an entropy of 1; it notes at which temperature it is asked."""

    logprobs: Tensor | None = None  # default: 0
    temperatures: list[float] = field(default_factory=list)

    def __call__(self, packed: PackedBatch, temperature: float, with_entropy: bool) -> PolicyOutput:
        self.temperatures.append(temperature)
        logprobs = torch.zeros(len(packed.target)) if self.logprobs is None else self.logprobs
        return PolicyOutput(logprobs, torch.ones_like(logprobs) if with_entropy else None)


@dataclass
class Engine:
    """In place of FSDP: each pack passes the model, nothing is updated."""

    module: Known

    def score(self, packs: Shard, forward: Any) -> list[Tensor]:
        return [forward(self.module, packed) for packed in packs]

    update = score


def test_policy_kl_and_entropy_terms_by_hand() -> None:
    """Ratio 1, so -A; k2 of log ratios -1 and 2; the weights are those of the batch, whatever else is in the pack."""
    logprobs = torch.tensor([-0.5, -3.0])
    packed = PackedBatch(
        token_ids=PLACES,
        position_ids=PLACES,
        segments=(),
        source=PLACES,
        target=PLACES,
        sample=PLACES,
        advantages=torch.tensor([1.0, -2.0]),
        rollout_logprobs=logprobs,
        old_logprobs=logprobs,
        ref_logprobs=logprobs + torch.tensor([-1.0, 2.0]),
        loss_weights=torch.tensor([0.5, 0.125]),
        metric_weight=0.25,
    )
    algorithm = replace(PLAIN, kl=KLTerm(KLPlacement.LOSS, "k2", 0.1), entropy_coefficient=0.01)
    loss, metrics = policy_loss(Known(logprobs), packed, algorithm, temperature=1.0)
    first, second = -1.0 + 0.1 * 0.5 - 0.01, 2.0 + 0.1 * 2.0 - 0.01
    assert float(loss) == pytest.approx(0.5 * first + 0.125 * second)
    assert metrics["actor/kl"].value().value == pytest.approx(0.25 * (0.5 + 2.0))
    assert metrics["actor/entropy"].value().value == pytest.approx(0.25 * (1.0 + 1.0))


def test_scores_and_updates_are_at_the_temperature_of_the_rollouts() -> None:
    batch = batch_of(random_samples(1))
    batch = policy_minibatch(replace(batch, advantages=np.ones_like(batch.rollout_logprobs)), PLAIN)
    shard = Shard(batch, [[unit] for unit in make_units(batch, True, 1000)])
    worker = PolicyWorker(Engine(Known()), temperature=0.7)  # type: ignore[arg-type]
    worker.score(shard)
    worker.update(shard, PLAIN, compare_engine=True)
    assert worker.engine.module.temperatures == [0.7] * 2 * len(shard)
