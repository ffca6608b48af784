"""Is the run collapsing? Every step's metrics against thresholds, most of them relative to the run's own first steps.

Pure decisions: nothing here knows of checkpoints or engines. `python -m verl.trainer.collapse > docs/collapse.md`
writes the page.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from verl.errors import VerlError

WARM_UP = 5  # first steps with a metric; their values are its start
MAX_ROLLBACKS = 2  # of one process; the next alarm stops it
REWARD = "reward/total"

_PAGE = f"""# Collapse watch

Training with rewards can go wrong for good, and most of it shows in the metrics of every step (docs/metrics.md). After
each step the signs below are compared with their thresholds. The *start* of a metric is the median of its first
{WARM_UP} values in this run; a sign that is relative to it is not judged before they are there. A sign must hold for
*patience* steps in a row to raise an alarm; one whose metric a run does not have never does. "Without reward": only in
steps whose `reward/total` is not above its start, because shorter, surer or longer replies that earn more are learning.

`trainer.on_collapse` says what an alarm does:

- `warn` (the default) logs it, with the likely cause and the setting to change, once for each time it holds so long.
- `stop` ends the run with exit code 1. Nothing is saved after the first step in which the sign held. The same command
  goes on from the newest checkpoint; with other settings it is another run, which may begin with that checkpoint's `hf`
  folder as `model.path`, under another `trainer.experiment_name`.
- `rollback` takes weights, optimizer, controllers and metrics back to the newest checkpoint and goes on from there. The
  data stream is not taken back, so that other prompts come. It does so at most {MAX_ROLLBACKS} times in one process;
  the next alarm stops the run, and so does one before the first checkpoint. The metrics, transcripts and records of
  the steps taken back are dropped.

Alarms that stop a run or take it back are kept in `collapses.jsonl` in its folder, with the metrics of their step.

With `stop` and `rollback` a checkpoint that falls due while any sign holds waits for the first step in which none does,
so that every checkpoint on disk is one to go on from; the last step's is written in any case.
`collapse/signs` tells how many signs hold. Starts and counts are in checkpoints.
"""


class CollapseError(VerlError, RuntimeError):
    """The run has collapsed and is not to go on."""


@dataclass(frozen=True, slots=True)
class CollapseRule:
    """What a collapse looks like in one metric."""

    name: str
    metrics: tuple[str, ...]  # the first of them that a step has is looked at
    triggered: Callable[[float, Sequence[float]], bool]  # (now, the first WARM_UP values; empty where not relative)
    threshold: str  # `triggered` in words
    cause: str
    hint: str
    patience: int = 5  # steps in a row
    relative: bool = True
    without_reward: bool = False  # only in steps that earn no more than the first ones
    compares: bool = False  # only where the algorithm compares the responses to a prompt
    whole: bool = False  # only where the engine samples from all of the policy's distribution


SIGNS = (
    CollapseRule(
        "broken update",
        ("actor/grad_norm",),
        lambda now, _: not math.isfinite(now),
        "not a finite number",
        "an overflow or a NaN has reached the weights",
        "lower actor.optim.lr or actor.grad_clip, or set model.compute_dtype=float32",
        patience=1,
        relative=False,
    ),
    CollapseRule(
        "mismatch",
        ("correction/engine_kl", "engine/kl"),
        lambda now, _: abs(now) > 0.1,
        "more than 0.1 nats from 0 (bfloat16 on both sides gives 0.001 to 0.01)",
        "the engine samples from another policy than the one that is trained: older weights, or other arithmetic",
        "lower rollout.max_staleness, set rollout.dtype=float32, or set algorithm.old_logprobs=rollout",
        patience=3,
        relative=False,
        whole=True,
    ),
    CollapseRule(
        "few effective samples",
        ("correction/ess",),
        lambda now, _: now < 0.3,
        "under 0.3",
        "importance weights leave the update to a few samples: the policy moves faster than its samples are renewed",
        "lower rollout.max_staleness or actor.optim.lr",
        relative=False,
        whole=True,
    ),
    CollapseRule(
        "lost reward",
        (REWARD,),
        lambda now, start: now < min(start) - (max(start) - min(start)),
        "further below the lowest of the first values than that is below the highest",
        "the policy has become worse than it began",
        "lower actor.optim.lr, or pay for KL (algorithm.kl_placement)",
    ),
    CollapseRule(
        "entropy gone",
        ("actor/entropy",),
        lambda now, start: now < 0.05 * median(start),
        "under 5 % of its start",
        "the policy says the same thing every time, and it is not a good one",
        "raise algorithm.clip_high or rollout.temperature, or lower actor.optim.lr",
        without_reward=True,
    ),
    CollapseRule(
        "entropy explosion",
        ("actor/entropy",),
        lambda now, start: now > 3 * median(start) and now > median(start) + 0.5,
        "over 3 times its start and 0.5 nats above it",
        "the policy falls apart into noise",
        "lower actor.optim.lr or algorithm.entropy_coefficient, or pay for KL (algorithm.kl_placement)",
        without_reward=True,
    ),
    CollapseRule(
        "tools abandoned",
        ("tools/usage_rate",),
        lambda now, start: median(start) >= 0.2 and now < 0.1 * median(start),
        "under a tenth of its start, where that is at least 0.2",
        "calls cost more than they earn, or fail: see tools/unavailable, tools/timeout and tools/user_error",
        "mend the tools, reward good calls (reward.name), or raise env.tool_timeout_s and data.max_response_length",
    ),
    CollapseRule(
        "unreadable calls",
        ("tools/parse_errors_mean",),
        lambda now, start: now > 0.5 and now > 3 * median(start),
        "over 0.5 an episode and 3 times its start",
        "the policy unlearns how calls are written",
        "make a call that cannot be read cost something (env.on_parse_error=end, reward.name), or lower actor.optim.lr",
    ),
    CollapseRule(
        "format lost",
        ("reward/format",),
        lambda now, start: median(start) >= 0.2 and now < 0.25 * median(start),
        "under a quarter of its start, where that is at least 0.2",
        "the policy unlearns the format of replies",
        "lower actor.optim.lr, pay for KL (algorithm.kl_placement), or pay more for the format",
    ),
    CollapseRule(
        "cut off",
        ("response_length/clip_ratio",),
        lambda now, start: median(start) < 0.9 and now > (1 + median(start)) / 2,
        "over half of the way from its start to 1, where that is under 0.9",
        "replies grow until they are cut off, and what is cut off earns nothing",
        "raise data.max_response_length, or set algorithm.overlong_buffer",
    ),
    CollapseRule(
        "dead groups",
        ("reward/zero_variance_groups",),
        lambda now, _: now >= 0.95,
        "at least 0.95",
        "all replies to a prompt earn the same, so that nothing can be learned: too hard, or a policy without variety",
        "take easier data.train_files, raise rollout.n or rollout.temperature, or lower actor.optim.lr",
        patience=10,
        relative=False,
        without_reward=True,
        compares=True,
    ),
    CollapseRule(
        "short replies",
        ("response_length/mean",),
        lambda now, start: now < 0.25 * median(start),
        "under a quarter of its start",
        "the policy gives up answering",
        "look at the transcripts for what the reward pays; lower actor.optim.lr",
        without_reward=True,
    ),
    CollapseRule(
        "long replies",
        ("response_length/mean",),
        lambda now, start: now > 4 * median(start),
        "over 4 times its start",
        "the policy rambles: length is not paid for, or paid by the wrong sign",
        "set algorithm.overlong_buffer, or another algorithm.aggregation",
        without_reward=True,
    ),
)


def rules_for(needs_group: bool, truncated: bool = False) -> list[CollapseRule]:
    """Those that say something of an algorithm that compares the responses to a prompt, or of one that does not.

    truncated: the engine samples from a part of the policy's distribution, so that the two differ by intent
    """
    fitting = [sign for sign in SIGNS if needs_group or not sign.compares]
    return [sign for sign in fitting if not (truncated and sign.whole)]


@dataclass(frozen=True, slots=True)
class Alarm:
    """A sign that has held for as long as it may."""

    sign: CollapseRule
    metric: str
    first: int  # step in which it began to hold
    step: int
    value: float
    start: float | None  # the metric's

    def __str__(self) -> str:
        since = "" if self.start is None else f" (it began at {self.start:.3g})"
        steps = f"step {self.step}" if self.first == self.step else f"steps {self.first} to {self.step}"
        return (
            f"{self.sign.name}, {steps}: {self.metric} is {self.value:.3g}{since}, {self.sign.threshold}. "
            f"Likely {self.sign.cause}. What helps: {self.sign.hint}"
        )


@dataclass
class CollapseWatch:
    """Remembers how the run began, and for how long each sign has held."""

    signs: Sequence[CollapseRule] = SIGNS
    starts: dict[str, list[float]] = field(default_factory=dict)  # metric -> its first finite values
    held: dict[str, list[int]] = field(default_factory=dict)  # sign -> [first step, steps], of those that hold

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """The alarms that this step raises; each once, until its sign has let go and held again."""
        alarms = [alarm for sign in self.signs if (alarm := self._alarm(sign, step, metrics)) is not None]
        watched = {REWARD, *(name for sign in self.signs for name in sign.metrics)}
        for name in watched & metrics.keys():
            values = self.starts.setdefault(name, [])
            if len(values) < WARM_UP and math.isfinite(metrics[name]):
                values.append(float(metrics[name]))
        return alarms

    def _alarm(self, sign: CollapseRule, step: int, metrics: Mapping[str, float]) -> Alarm | None:
        metric = next((name for name in sign.metrics if name in metrics), None)
        if metric is None:
            return None
        start = self._start(metric)
        if not self._triggered(sign, metrics, metric, start):
            self.held.pop(sign.name, None)
            return None
        first, count = self.held.get(sign.name, (step, 0))
        self.held[sign.name] = [first, count + 1]
        if count + 1 != sign.patience:
            return None
        return Alarm(sign, metric, first, step, metrics[metric], median(start) if sign.relative else None)

    def _triggered(self, sign: CollapseRule, metrics: Mapping[str, float], metric: str, start: Sequence[float]) -> bool:
        if sign.relative and not start:
            return False
        if sign.without_reward and REWARD in metrics:
            earned = self._start(REWARD)
            if not earned or metrics[REWARD] > median(earned):
                return False
        return sign.triggered(metrics[metric], start)

    def _start(self, metric: str) -> Sequence[float]:
        """The metric's first values; none before all of them are there."""
        values = self.starts.get(metric, [])
        return values if len(values) == WARM_UP else []

    def state(self) -> dict[str, Any]:
        """As plain JSON."""
        return {"starts": {**self.starts}, "held": {**self.held}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        self.starts = {name: list(values) for name, values in state["starts"].items()}
        self.held = {name: list(since) for name, since in state["held"].items()}


def markdown() -> str:
    """The page docs/collapse.md."""
    rows = []
    for sign in SIGNS:
        where = " or ".join(f"`{name}`" for name in sign.metrics) + (", without reward" if sign.without_reward else "")
        rows.append(f"| {sign.name} | {where} | {sign.threshold} | {sign.patience} | {sign.cause} | {sign.hint} |")
    head = ("| sign | metric | threshold | patience | likely cause | what helps |", "|---|---|---|---|---|---|")
    return "\n".join([_PAGE, *head, *rows, ""])


if __name__ == "__main__":
    sys.stdout.write(markdown())
