"""The metrics of a step; names and units are listed in docs/metrics.md."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from verl.algorithms.filters import num_written
from verl.algorithms.kl import KL_ESTIMATORS
from verl.batch.experience import distilled, sampling_logprobs
from verl.batch.packing import make_units
from verl.batch.token_batch import Ints, TokenBatch
from verl.tracking.flops import TRAINING, DecoderShape, forward_flops, mfu
from verl.trainer.policy import PackSettings
from verl.types import Score, StopReason, ToolStatus, ToolUse, Trajectory, TrajectoryGroup

Metrics = dict[str, float]
TURN_LIMITS = (StopReason.MAX_TURNS, StopReason.MAX_TOOL_CALLS)


def rollout_metrics(groups: Sequence[TrajectoryGroup]) -> Metrics:
    """Mean reward and its parts, by data source if there are several; zero-variance groups; lengths, segments."""
    by_source: dict[str, list[TrajectoryGroup]] = defaultdict(list)
    for group in groups:
        by_source[group.task.data_source].append(group)
    metrics = _reward_means("reward", groups)
    if len(by_source) > 1:
        for source, members in by_source.items():
            metrics |= _reward_means(f"reward/{source}", members)
    responses = [trajectory for group in groups for trajectory in group.trajectories]
    lengths = [num_written(trajectory) for trajectory in responses]
    clipped = sum(trajectory.stop_reason is StopReason.LENGTH for trajectory in responses)
    segments = [len(trajectory.segments) for trajectory in responses]
    split = {"segments/mean": sum(segments) / len(segments), "segments/max": max(segments)} if max(segments) > 1 else {}
    paid = any(turn.reward is not None for trajectory in responses for turn in trajectory.turns)
    return {
        **metrics,
        **({"reward/turns": sum(each.turn_rewards for each in responses) / len(responses)} if paid else {}),
        "reward/zero_variance_groups": sum(len(set(group.returns)) == 1 for group in groups) / len(groups),
        "response_length/mean": sum(lengths) / len(lengths),
        "response_length/max": max(lengths),
        "response_length/clip_ratio": clipped / len(responses),
        **split,
        **_count_means(responses),
    }


def _count_means(responses: Sequence[Trajectory]) -> Metrics:
    """The means of what programs that drive their episodes count."""
    names = dict.fromkeys(name for trajectory in responses for name in trajectory.counts)
    return {name: sum(each.counts.get(name, 0) for each in responses) / len(responses) for name in names}


def tool_metrics(groups: Sequence[TrajectoryGroup]) -> Metrics:
    """Tool usage of the policy, if it has tools: rates, outcomes and times of its calls.

    Calls of attempts that failed because of a broken service count in the shares of outcomes, not in the usage.
    """
    judged = [pair for group in groups for pair in zip(group.trajectories, group.scores, strict=True)]
    responses = [trajectory for trajectory, _ in judged]
    uses = [use for trajectory in responses for use in trajectory.tool_uses]
    attempts = [*uses, *(use for group in groups for use in group.lost_uses)]
    num_malformed = sum(trajectory.num_malformed_calls for trajectory in responses)
    if not attempts and not num_malformed and all(len(trajectory.turns) == 1 for trajectory in responses):
        return {}
    correct = [trajectory for trajectory, score in judged if score.parts.get("correct", 0.0) > 0]
    rates = {"usage_rate": responses, **({"usage_rate_correct": correct} if correct else {})}
    return {
        "tools/turns_mean": sum(len(trajectory.turns) for trajectory in responses) / len(responses),
        "tools/calls_mean": len(uses) / len(responses),
        "tools/turn_limit_rate": sum(each.stop_reason in TURN_LIMITS for each in responses) / len(responses),
        **{f"tools/{name}": sum(bool(each.tool_uses) for each in of) / len(of) for name, of in rates.items()},
        "tools/parse_errors_mean": num_malformed / len(responses),
        "tools/repeats": sum(trajectory.repeats for trajectory in responses),
        **{
            f"tools/{status}": sum(use.status is status for use in attempts) / len(attempts)
            for status in ToolStatus
            if attempts
        },
        **{f"tools/{name}/seconds_mean": mean for name, mean in _mean_seconds(attempts).items()},
    }


def _mean_seconds(uses: Iterable[ToolUse]) -> dict[str, float]:
    """{tool: mean seconds} of calls that reached a tool; the names of others are arbitrary policy output."""
    by_tool: dict[str, list[float]] = defaultdict(list)
    for use in uses:
        if use.status in (ToolStatus.SUCCESS, ToolStatus.TIMEOUT):
            by_tool[use.name].append(use.seconds)
    return {name: sum(seconds) / len(seconds) for name, seconds in by_tool.items()}


def _reward_means(prefix: str, groups: Iterable[TrajectoryGroup]) -> Metrics:
    means = score_means([score for group in groups for score in group.scores])
    return {f"{prefix}/{name}": mean for name, mean in means.items()}


def score_means(scores: Sequence[Score]) -> Metrics:
    """Means of the total and of each part over all scores; a missing part counts as 0, unless it does not apply."""
    names = dict.fromkeys(name for score in scores for name in score.parts)
    means = {"total": sum(score.total for score in scores) / len(scores)} if scores else {}
    for name in names:
        counted = [score for score in scores if name.partition("/")[0] not in score.not_counted]
        means[name] = sum(score.parts.get(name, 0.0) for score in counted) / len(counted)
    return means


def reference_kl(batch: TokenBatch, estimator: str = "k1") -> float:
    """Token mean of the KL estimate over the trained tokens."""
    assert batch.ref_logprobs is not None
    policy_A, ref_A = torch.from_numpy(sampling_logprobs(batch)), torch.from_numpy(batch.ref_logprobs)
    return float(KL_ESTIMATORS[estimator](policy_A, ref_A).mean())


def teacher_kl(batch: TokenBatch) -> float:
    """Token mean of log p - log p_teacher over the tokens that the policy sampled: estimates KL(p, p_teacher)."""
    assert batch.rollout_logprobs is not None
    num_sampled = int(np.count_nonzero(~np.isnan(batch.rollout_logprobs)))
    return -float(distilled(batch).sum(dtype=np.float64)) / max(1, num_sampled)


def explained_variance(batch: TokenBatch) -> float:
    """1 - Var(returns - values) / Var(returns) over the trained tokens: 1 is a perfect critic, 0 a constant one."""
    assert batch.returns is not None and batch.values is not None
    returns, values = torch.from_numpy(batch.returns), torch.from_numpy(batch.values)
    variance = returns.var()
    return float(1.0 - (returns - values).var() / variance) if variance > 0 else 0.0


def throughput(
    groups: Sequence[TrajectoryGroup], batch: TokenBatch, computed: Ints, timings: Mapping[str, float]
) -> Metrics:
    """Tokens per second of the rollout (all responses), the update (computed samples) and the whole step.

    computed: rows of the batch that the update computed
    """
    written = sum(num_written(trajectory) for group in groups for trajectory in group.trajectories)
    total, updated = int(batch.num_tokens.sum()), int(batch.num_tokens[computed].sum())
    return {
        "perf/rollout_tokens_per_s": written / timings["time/rollout_s"],
        "perf/update_tokens_per_s": updated / timings["time/update_s"],
        "perf/tokens_per_s": total / timings["time/step_s"],
    }


@dataclass(frozen=True, slots=True)
class Meter:
    """Model FLOPs utilization of the update."""

    shape: DecoderShape
    peak: float | None  # FLOP/s of one device; None if unknown: no metric
    num_devices: int
    cost: int = TRAINING  # of forward and backward, in forward passes
    observations: bool = False  # whether the log-probs of observations are computed, too

    def mfu(self, batch: TokenBatch, packing: PackSettings, seconds: float) -> Metrics:
        """Forward and backward FLOPs of every unit: its prefix once, and the inputs of each sample behind it."""
        if self.peak is None:
            return {}
        segments, inputs = [], batch.num_inputs.tolist()
        for unit in make_units(batch, packing.share_prefix, packing.max_tokens_per_pack):
            segments.append((unit.prefix, 0))
            segments += [(max(inputs[row] - unit.prefix, 0), unit.prefix) for row in unit.samples]
        predicted = int(batch.num_trained.sum()) + (int(batch.observed.sum()) if self.observations else 0)
        return mfu(self.cost * forward_flops(self.shape, segments, predicted), seconds, self.peak, self.num_devices)
