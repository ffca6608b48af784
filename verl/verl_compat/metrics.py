"""The metrics that veRL's trainer logs, under its names and by its definitions: trainer.logger=[verl_names]."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean

import numpy as np
import torch

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.filters import num_written
from verl.algorithms.kl import apply_kl_penalty
from verl.algorithms.names import KLPlacement
from verl.batch.experience import sampling_logprobs
from verl.batch.token_batch import Floats, Ints, TokenBatch
from verl.config.schema import Config
from verl.types import TrajectoryGroup
from verl.verl_compat.metric_names import renamed

Metrics = dict[str, float]


def verl_step_metrics(
    metrics: Metrics, batch: TokenBatch, groups: Sequence[TrajectoryGroup], algorithm: Algorithm, config: Config
) -> Metrics:
    """metrics: ours of the step. batch, groups: the trained samples with their advantages, and all rollouts"""
    assert batch.rewards is not None and batch.advantages is not None
    rewards_A, kl = torch.from_numpy(batch.rewards), algorithm.kl
    if kl.placement is KLPlacement.REWARD:
        assert batch.ref_logprobs is not None
        policy_A, ref_A = torch.from_numpy(sampling_logprobs(batch)), torch.from_numpy(batch.ref_logprobs)
        rewards_A = apply_kl_penalty(rewards_A, policy_A, ref_A, metrics["kl/coefficient"], kl.estimator)
    starts = batch.bounds.tokens[batch.episode_bounds[:-1]]
    prompts = np.array([np.argmax(batch.action_mask[start:]) for start in starts])
    written = [num_written(each) for group in groups for each in group.trajectories]
    bonus = metrics.get("actor/entropy_coefficient", algorithm.entropy_coefficient)
    plain = kl.placement is not KLPlacement.LOSS and not bonus and not algorithm.teacher_top_k
    total = int(batch.num_tokens.sum())
    return {
        **renamed(metrics),
        **({"actor/pg_loss": metrics["actor/loss"]} if plain and "actor/loss" in metrics else {}),
        **_stats("critic/score", _per_episode(batch.rewards, batch)),
        **_stats("critic/rewards", _per_episode(rewards_A.numpy(), batch)),
        **_stats("critic/advantages", batch.advantages),
        **({} if batch.returns is None else _stats("critic/returns", batch.returns)),
        **({} if batch.values is None else _stats("critic/values", batch.values)),
        "response_length/min": float(min(written)),
        **_stats("prompt_length", prompts),
        "prompt_length/clip_ratio": float((prompts == config.data.max_prompt_length).mean()),
        "perf/total_num_tokens": float(total),
        "perf/throughput": total / (metrics["time/step_s"] * config.num_ranks),
    }


def verl_validation_metrics(groups: Iterable[TrajectoryGroup], n: int) -> Metrics:
    """n: responses per task"""
    totals: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        totals[group.task.data_source] += [score.total for score in group.scores]
    means = {source: fmean(its) for source, its in totals.items() if its}
    return {
        **{f"val-core/{source}/reward/mean@{n}": mean for source, mean in means.items()},
        **{f"val/test_score/{source}": mean for source, mean in means.items()},
    }


def _per_episode(values_A: Floats, batch: TokenBatch) -> Floats:
    """[E] the sums of a value of trained tokens."""
    sums = np.append(0.0, np.cumsum(values_A, dtype=np.float64))
    return np.diff(sums[batch.bounds.trained[batch.episode_bounds]])


def _stats(name: str, values: Floats | Ints) -> Metrics:
    stats = {"mean": values.mean(), "max": values.max(), "min": values.min()}
    return {f"{name}/{stat}": float(value) for stat, value in stats.items()}
