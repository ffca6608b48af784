"""Statistics of a probe's rollouts: does the data have a learning signal under these settings?"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from toolrl.benchmarks.runner.report import CUT_OFF
from toolrl.benchmarks.runner.stats import estimate
from toolrl.check.probe.zero_variance import predict
from verl.text import prompt_sha256
from verl.types import Task

SIZES = (2, 4, 8, 16, 32)
_TOLERANCE = 1e-9
_LEAST_USEFUL = 0.01  # share of groups with a nonzero advantage below which no cost is computed
Rollout = Mapping[str, Any]  # a record of toolrl.benchmarks.runner.records
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Criteria:
    """right: of a task and a rollout; best_format: the format part of a gold response, if known"""

    right: Callable[[Task, Rollout], bool]
    best_format: float | None = None

    def well_formed(self, rollout: Rollout) -> bool | None:
        """Whether the response has a valid format; None if the reward has no format part."""
        part = rollout["score"]["parts"].get("format")
        if part is None:
            return None
        return bool(part > 0 if self.best_format is None else part >= self.best_format - _TOLERANCE)


@dataclass(frozen=True, slots=True)
class Cost:
    """seconds: of the engine, with all requests in parallel; tasks=0: unknown"""

    tasks: int
    seconds: float


def row_of(task: Task, group: Sequence[Rollout], criteria: Criteria) -> Row:
    """Statistics of one row of the data, for filtering. `spread`: the standard deviation of the rewards"""
    rewards = [rollout["reward"] for rollout in group]
    return {
        "task_id": task.id,
        "prompt_sha256": prompt_sha256(task.prompt),
        "n": len(group),
        "mean_reward": fmean(rewards),
        "success_rate": fmean(criteria.right(task, rollout) for rollout in group),
        "spread": pstdev(rewards),
        "zero_variance": len(set(rewards)) == 1,
    }


def summary(
    rows: Sequence[Row], groups: Sequence[Sequence[Rollout]], criteria: Criteria, cost: Cost, resamples: int
) -> dict[str, Any]:
    """All statistics. rows: of `row_of`, [P]; groups: their rollouts, [P][n]"""
    rollouts = [rollout for group in groups for rollout in group]
    tokens = fmean(rollout["num_tokens"] for rollout in rollouts)
    seconds = cost.seconds / (cost.tasks * len(groups[0])) if cost.tasks else None
    return {
        "n": len(groups[0]),
        "rows": len(rows),
        "reward": estimate("reward", [row["mean_reward"] for row in rows], resamples).as_dict(),
        "spread_between_rows": pstdev([row["mean_reward"] for row in rows]),
        "spread_within_groups": fmean(row["spread"] for row in rows),
        "success": estimate("success", [row["success_rate"] for row in rows], resamples).as_dict(),
        "never_right": fmean(row["success_rate"] == 0 for row in rows),
        "always_right": fmean(row["success_rate"] == 1 for row in rows),
        "useless_never_right": fmean(row["success_rate"] == 0 and row["zero_variance"] for row in rows),
        "useless_always_right": fmean(row["success_rate"] == 1 and row["zero_variance"] for row in rows),
        "zero_variance": estimate("zero_variance", [float(row["zero_variance"]) for row in rows], resamples).as_dict(),
        "sizes": _sizes([[rollout["reward"] for rollout in group] for group in groups], tokens, seconds),
        "format": _format_rate(rollouts, criteria),
        "malformed": fmean(rollout["malformed_calls"] > 0 for rollout in rollouts),
        "tool_calls": fmean(len(rollout["tool_uses"]) for rollout in rollouts),
        "tools_used": fmean(bool(rollout["tool_uses"]) for rollout in rollouts),
        "cut_off": fmean(rollout["stop_reason"] in CUT_OFF for rollout in rollouts),
        "tokens": tokens,
        "seconds": seconds,
    }


def _sizes(rewards: Sequence[Sequence[float]], tokens: float, seconds: float | None) -> list[dict[str, Any]]:
    """Per group size: the share of zero-variance groups, and the cost per other group. tokens, seconds: per rollout"""
    rows = []
    for size in sorted({*SIZES, len(rewards[0])}):
        prediction = predict(rewards, size)
        useful = 1 - prediction.share
        rollouts = size / useful if useful >= _LEAST_USEFUL else None
        rows.append(
            {
                "n": size,
                "zero_variance": prediction.share,
                "how": prediction.how,
                "tokens": None if rollouts is None else tokens * rollouts,
                "seconds": None if rollouts is None or seconds is None else seconds * rollouts,
            }
        )
    return rows


def _format_rate(rollouts: Sequence[Rollout], criteria: Criteria) -> float | None:
    """None if the reward has no format part, or one that is always 0."""
    formed = [
        (rollout, formed_well) for rollout in rollouts if (formed_well := criteria.well_formed(rollout)) is not None
    ]
    if not formed or (criteria.best_format == 0 and all(formed_well for _, formed_well in formed)):
        return None
    return fmean(formed_well for _, formed_well in formed)
