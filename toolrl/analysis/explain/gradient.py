"""The share of a sample in the gradient of its update, computed again from the step's record.

Gradients add up over the samples of an update, norms do not. So a sample's share is the length of its gradient along
the gradient g of the whole update, <g_sample, g> / |g|: the shares of all samples add up to |g|, the norm before
clipping. It is negative where the sample pulls against the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.distributed.tensor import DTensor

from toolrl.analysis.replay.record import Record, read_record
from toolrl.analysis.replay.replay import ReplayPlan, learner_before, plan_replay, replayed_config
from verl.algorithms.algorithm import Algorithm
from verl.batch.packing import Shard
from verl.batch.token_batch import TokenBatch
from verl.config.schema import Config
from verl.single_controller.ray import Cluster
from verl.trainer.policy import Policy
from verl.workers.policy_worker import PolicyWorker, policy_loss


@dataclass(frozen=True, slots=True)
class GradientShare:
    """own: norm of the sample's gradient; share: its length along that of the update; whole: norm of the update's"""

    own: float
    share: float
    whole: float
    samples: int  # of the update


def gradient_share(folder: Path, step: int, row: int, user_code: bool = False) -> GradientShare | None:
    """In new processes, by a replay up to the step. row: of the sample in the batch of the step; user_code: as of it

    None if no update computed the sample. Raises DataError or ConfigError if the step cannot be replayed.
    """
    plan = plan_replay(folder, step)
    target = read_record(plan.records[-1])
    config = replayed_config(target, user_code)
    run, join = config.trainer, config.trainer.nnodes > 1
    with Cluster.start(2 * config.num_ranks, None, run.stall_timeout_s, join, run.health_timeout_s) as cluster:
        return gradient_share_from(plan, target, config, cluster, row)


def gradient_share_from(
    plan: ReplayPlan, target: Record, config: Config, cluster: Cluster, row: int
) -> GradientShare | None:
    with learner_before(plan, target, config, cluster) as learner:
        observer = _ShareObserver(row)
        learner = replace(learner, observer=observer)
        learner.timer.start()
        learner.learn(replace(target.batch, numbers=np.arange(len(target.batch))), target.step - 1)
    return observer.share


@dataclass
class _ShareObserver:
    """Computes the share of a sample before the first update with it, from the same weights."""

    row: int
    share: GradientShare | None = None

    def __call__(self, policy: Policy, computed: TokenBatch, algorithm: Algorithm) -> None:
        assert computed.numbers is not None
        places = np.flatnonzero(computed.numbers == self.row)
        if len(places) and self.share is None:
            both = [policy.shard(each).shards() for each in (computed, computed.rows(places))]
            shares = policy.workers.scatter(_share, list(zip(*both, strict=True)), algorithm, len(computed))
            self.share = shares[0]


def _share(worker: PolicyWorker, shards: tuple[Shard, Shard], algorithm: Algorithm, samples: int) -> GradientShare:
    """On a rank. shards: of all samples of the update, and of the sample alone"""
    loss = partial(policy_loss, algorithm=algorithm, temperature=worker.temperature, compare_engine=False)
    parameters = list(worker.engine.module.parameters())
    gradients: list[list[Tensor | None]] = []
    for shard in shards:
        worker.engine.backward(shard, loss)
        gradients.append([each.grad for each in parameters])
        worker.engine.module.zero_grad()  # sets them to None
    whole, own = gradients
    norm = math.sqrt(_product(whole, whole))
    along = _product(own, whole) / norm if norm else 0.0
    return GradientShare(math.sqrt(_product(own, own)), along, norm, samples)


def _product(one: Sequence[Any], two: Sequence[Any]) -> float:
    """The inner product over all ranks."""
    pairs = [(a, b) for a, b in zip(one, two, strict=True) if a is not None and b is not None]
    products = [(a * b).sum() for a, b in pairs]
    return math.fsum(float(each.full_tensor() if isinstance(each, DTensor) else each) for each in products)
