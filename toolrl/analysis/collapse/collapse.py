"""Collapse detection: rules on every step's metrics, most of them relative to the first steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from verl.algorithms.algorithm import Algorithm
from verl.config.schema import Config

WARM_UP = 5  # first values of a metric; their median is its start
REWARD = "reward/total"


@dataclass(frozen=True, slots=True)
class CollapseRule:
    name: str
    metrics: tuple[str, ...]  # the first that the step has is used
    triggered: Callable[[float, Sequence[float]], bool]  # (now, the first WARM_UP values; empty where not relative)
    threshold: str  # description of `triggered`
    cause: str
    hint: str
    patience: int = 5  # consecutive steps
    relative: bool = True
    without_reward: bool = False  # only in steps whose reward is not above its start
    needs_group: bool = False  # only for algorithms with group-relative advantages
    full_distribution: bool = False  # only without top_p, top_k, repetition_penalty


COLLAPSE_RULES = (
    CollapseRule(
        "broken update",
        ("actor/grad_norm",),
        lambda now, _: not math.isfinite(now),
        "not a finite number",
        "the gradient overflowed, or an input was NaN; the update was left out",
        "lower actor.optim.lr or actor.grad_clip, or set model.compute_dtype=float32",
        patience=1,
        relative=False,
    ),
    CollapseRule(
        "mismatch",
        ("correction/engine_kl", "engine/kl"),
        lambda now, _: abs(now) > 0.1,
        "more than 0.1 nats from 0 (bfloat16 on both sides gives 0.001 to 0.01)",
        "the engine samples from another policy than the trained one: stale weights, or different numerics",
        "lower rollout.max_staleness, set rollout.dtype=float32, or set algorithm.old_logprobs=rollout",
        patience=3,
        relative=False,
        full_distribution=True,
    ),
    CollapseRule(
        "few effective samples",
        ("correction/ess",),
        lambda now, _: now < 0.3,
        "under 0.3",
        "importance sampling weights concentrate on a few samples: the policy changes faster than they are renewed",
        "lower rollout.max_staleness or actor.optim.lr",
        relative=False,
        full_distribution=True,
    ),
    CollapseRule(
        "lost reward",
        (REWARD,),
        lambda now, start: now < min(start) - (max(start) - min(start)),
        "below the lowest of the first values by more than their range",
        "the policy has become worse than at the start",
        "lower actor.optim.lr, or penalize KL (algorithm.kl_placement)",
    ),
    CollapseRule(
        "entropy collapse",
        ("actor/entropy",),
        lambda now, start: now < 0.05 * median(start),
        "under 5 % of its start",
        "the policy samples the same response every time, and not a good one",
        "raise algorithm.clip_high or rollout.temperature, or lower actor.optim.lr",
        without_reward=True,
    ),
    CollapseRule(
        "entropy explosion",
        ("actor/entropy",),
        lambda now, start: now > 3 * median(start) and now > median(start) + 0.5,
        "over 3 times its start and 0.5 nats above it",
        "the policy degenerates into noise",
        "lower actor.optim.lr or algorithm.entropy_coefficient, or penalize KL (algorithm.kl_placement)",
        without_reward=True,
    ),
    CollapseRule(
        "tools abandoned",
        ("tools/usage_rate",),
        lambda now, start: median(start) >= 0.2 and now < 0.1 * median(start),
        "under a tenth of its start, where that is at least 0.2",
        "calls cost more reward than they earn, or fail: see tools/unavailable, tools/timeout and tools/user_error",
        "fix the tools, reward good calls (reward.name), or raise env.tool_timeout_s and data.max_response_length",
    ),
    CollapseRule(
        "parse errors",
        ("tools/parse_errors_mean",),
        lambda now, start: now > 0.5 and now > 3 * median(start),
        "over 0.5 per episode and 3 times its start",
        "the policy unlearns the tool-call format",
        "penalize calls that cannot be parsed (env.on_parse_error=terminate, reward.name), or lower actor.optim.lr",
    ),
    CollapseRule(
        "format lost",
        ("reward/format",),
        lambda now, start: median(start) >= 0.2 and now < 0.25 * median(start),
        "under a quarter of its start, where that is at least 0.2",
        "the policy unlearns the response format",
        "lower actor.optim.lr, penalize KL (algorithm.kl_placement), or raise the format reward",
    ),
    CollapseRule(
        "truncated responses",
        ("response_length/clip_ratio",),
        lambda now, start: median(start) < 0.9 and now > (1 + median(start)) / 2,
        "over halfway from its start to 1, where the start is under 0.9",
        "responses grow until they are truncated, and truncated ones earn nothing",
        "raise data.max_response_length, or set algorithm.overlong_buffer",
    ),
    CollapseRule(
        "zero-variance groups",
        ("reward/zero_variance_groups",),
        lambda now, _: now >= 0.95,
        "at least 0.95",
        "all responses to a prompt earn the same, so their advantages are zero: too hard, or no exploration",
        "take easier data.train_files, raise rollout.n or rollout.temperature, or lower actor.optim.lr",
        patience=10,
        relative=False,
        without_reward=True,
        needs_group=True,
    ),
    CollapseRule(
        "short responses",
        ("response_length/mean",),
        lambda now, start: now < 0.25 * median(start),
        "under a quarter of its start",
        "the policy stops answering",
        "check in the transcripts what earns reward; lower actor.optim.lr",
        without_reward=True,
    ),
    CollapseRule(
        "long responses",
        ("response_length/mean",),
        lambda now, start: now > 4 * median(start),
        "over 4 times its start",
        "the policy rambles: length has no penalty, or one of the wrong sign",
        "set algorithm.overlong_buffer, or change algorithm.aggregation",
        without_reward=True,
    ),
)


def rules_for(needs_group: bool, truncated: bool = False) -> list[CollapseRule]:
    """needs_group: advantages are group-relative; truncated: the engine's policy differs on purpose (top_p ..)"""
    applicable = [rule for rule in COLLAPSE_RULES if needs_group or not rule.needs_group]
    return [rule for rule in applicable if not (truncated and rule.full_distribution)]


@dataclass(frozen=True, slots=True)
class Alarm:
    """A rule triggered in `patience` consecutive steps; a cause for early stopping or a rollback."""

    rule: CollapseRule
    metric: str
    first: int  # first step that triggered it
    step: int
    value: float
    start: float | None  # the metric's first value

    def __str__(self) -> str:
        since = "" if self.start is None else f" (start: {self.start:.3g})"
        steps = f"step {self.step}" if self.first == self.step else f"steps {self.first} to {self.step}"
        return (
            f"{self.rule.name}, {steps}: {self.metric} is {self.value:.3g}{since}, {self.rule.threshold}. "
            f"Likely cause: {self.rule.cause}. Hint: {self.rule.hint}"
        )


@dataclass
class CollapseWatch:
    """Tracks the start of every metric and for how long each rule has been triggered."""

    rules: Sequence[CollapseRule] = COLLAPSE_RULES
    starts: dict[str, list[float]] = field(default_factory=dict)  # metric -> its first finite values
    triggered: dict[str, list[int]] = field(default_factory=dict)  # rule -> [first step, number of steps]

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """The alarms raised by this step; a rule raises no other until a step has not triggered it."""
        alarms = [alarm for rule in self.rules if (alarm := self._alarm(rule, step, metrics)) is not None]
        watched = {REWARD, *(name for rule in self.rules for name in rule.metrics)}
        for name in watched & metrics.keys():
            values = self.starts.setdefault(name, [])
            if len(values) < WARM_UP and math.isfinite(metrics[name]):
                values.append(float(metrics[name]))
        return alarms

    def _alarm(self, rule: CollapseRule, step: int, metrics: Mapping[str, float]) -> Alarm | None:
        metric = next((name for name in rule.metrics if name in metrics), None)
        if metric is None:
            return None
        start = self._start(metric)
        if not self._triggered(rule, metrics, metric, start):
            self.triggered.pop(rule.name, None)
            return None
        first, count = self.triggered.get(rule.name, (step, 0))
        self.triggered[rule.name] = [first, count + 1]
        if count + 1 != rule.patience:
            return None
        return Alarm(rule, metric, first, step, metrics[metric], median(start) if rule.relative else None)

    def _triggered(self, rule: CollapseRule, metrics: Mapping[str, float], metric: str, start: Sequence[float]) -> bool:
        if rule.relative and not start:
            return False
        if rule.without_reward and REWARD in metrics:
            rewards = self._start(REWARD)
            if not rewards or metrics[REWARD] > median(rewards):
                return False
        return rule.triggered(metrics[metric], start)

    def _start(self, metric: str) -> Sequence[float]:
        """The first WARM_UP values of the metric; none before all of them exist."""
        values = self.starts.get(metric, [])
        return values if len(values) == WARM_UP else []

    def state(self) -> dict[str, Any]:
        return {"starts": {**self.starts}, "triggered": {**self.triggered}}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.starts = {name: list(values) for name, values in state.get("starts", {}).items()}
        self.triggered = {name: list(since) for name, since in state.get("triggered", {}).items()}


def build_watch(algorithm: Algorithm, config: Config) -> CollapseWatch:
    return CollapseWatch(rules_for(algorithm.needs_group, config.rollout.truncated))
