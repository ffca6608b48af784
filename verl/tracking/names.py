"""Every metric's name, unit and meaning: the table that docs/metrics.md is made from.

`python -m verl.tracking.names > docs/metrics.md` writes the page. A word in angle brackets stands for a name of the
run: a data set, a part of the reward, a phase.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

INTRODUCTION = """# Metrics

Names and units are fixed. A word in `<angle brackets>` stands for a name of the run: a data source, a validation set, a
benchmark's category, a part of the reward, a phase. Token means are over the tokens that the policy wrote; prompt and
tool tokens never count.
Those of `actor/`, `engine/` and `correction/` are over the samples that the update computed (`actor/computed_share`).
Those of `correction/` are of what the engine sampled; where nothing is corrected, weights are the plain ratios of its
tokens.
A metric is missing from a step where it does not apply: no critic, no validation, no known peak of the device.
Written to `metrics.jsonl` (one line a step) and TensorBoard. This page is made by `python -m verl.tracking.names`.
"""


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table."""

    name: str
    unit: str
    meaning: str


METRICS = (
    Metric("reward/total", "points", "mean reward of the step's replies, before shaping within the group"),
    Metric("reward/<part>", "points", "mean of one named part of the reward"),
    Metric("reward/<data_source>/total", "points", "mean reward of the replies to one data source"),
    Metric("reward/<data_source>/<part>", "points", "mean of one part over the replies to one data source"),
    Metric("reward/turns", "points", "mean sum of the rewards that an environment gave for a reply's turns, if any"),
    Metric("reward/zero_variance_groups", "share", "groups whose rewards are all equal: nothing to learn from"),
    Metric("reward/infrastructure_faults", "count", "replies left out because something broke; never trained as a 0"),
    Metric("reward/over_limit", "count", "responses over reward.timeout_s or memory_mib, scored as empty ones"),
    Metric("response_length/mean", "tokens", "mean length of what the policy wrote in an episode"),
    Metric("response_length/max", "tokens", "longest of them"),
    Metric("response_length/clip_ratio", "share", "replies cut off at the length limit"),
    Metric("reward/overlong_penalty", "points", "mean penalty for length, where the algorithm has one; 0 or less"),
    Metric("filter/kept", "share", "rollouts that the algorithm's filters kept, of all that the step drew"),
    Metric("filter/<filter>", "share", "rollouts that one filter dropped"),
    Metric(
        "filter/resample_rounds", "count", "times that the step drew prompts until it had enough groups, or gave up"
    ),
    Metric(
        "staleness/mean", "versions", "how old the weights were that a group was begun with, where max_staleness > 0"
    ),
    Metric("staleness/max", "versions", "of the oldest group; at most rollout.max_staleness"),
    Metric("staleness/depth", "steps", "ahead that prompts begin: 1, more while steps wait for rollouts, as allowed"),
    Metric("staleness/reused", "share", "groups that an earlier step had trained on, too"),
    Metric("tools/turns_mean", "1", "times that the policy wrote in an episode"),
    Metric("tools/calls_mean", "1", "tool calls that were made in an episode"),
    Metric("tools/usage_rate", "share", "episodes with a call (where the tool runs code: the code ratio)"),
    Metric("tools/usage_rate_correct", "share", "those among the correct ones, where the reward tells which are"),
    Metric("tools/parse_errors_mean", "1", "texts of an episode that meant to be calls, but could not be read"),
    Metric("tools/success", "share", "calls that went well"),
    Metric("tools/user_error", "share", "calls that were the policy's fault: wrong arguments, code that raises"),
    Metric("tools/timeout", "share", "calls that took too long"),
    Metric(
        "tools/unavailable",
        "share",
        "calls whose service was out of order, those of attempts that were begun anew for it, too",
    ),
    Metric("tools/<tool>/seconds_mean", "s", "mean time of one tool's calls"),
    Metric("actor/loss", "1", "loss of the policy, mean over the step's optimizer steps"),
    Metric("actor/grad_norm", "1", "norm of the gradient before clipping"),
    Metric("actor/lr", "1", "learning rate"),
    Metric("actor/entropy", "nats", "token mean of the entropy at the rollout's temperature"),
    Metric("actor/computed_share", "share", "samples that were computed in the update; the others had no signal"),
    Metric("actor/clip_fraction", "share", "tokens at which the clip removed the gradient"),
    Metric("actor/dual_clip_fraction", "share", "tokens at which the dual clip did"),
    Metric("actor/selected_fraction", "share", "tokens that the algorithm treats apart (Clip-Cov, KL-Cov)"),
    Metric("actor/ppo_kl", "nats", "token mean of log p_old - log p: how far the step's updates have gone"),
    Metric("actor/kl", "nats", "token mean of the KL estimate to the reference, where it is paid in the loss"),
    Metric("critic/loss", "1", "value loss"),
    Metric("critic/grad_norm", "1", "norm of the gradient before clipping"),
    Metric("critic/lr", "1", "learning rate"),
    Metric("critic/clip_fraction", "share", "tokens at which the value clip was active"),
    Metric("critic/values_mean", "points", "token mean of the values before the update"),
    Metric("critic/explained_variance", "1", "1 - Var(returns - values) / Var(returns); 1 is perfect, 0 a constant"),
    Metric(
        "engine/logprob_diff_mean",
        "nats",
        "mean of the absolute difference between the trainer's log p and the engine's, where it wrote",
    ),
    Metric("engine/logprob_diff_max", "nats", "largest of them"),
    Metric(
        "engine/kl",
        "nats",
        "token mean of log p by the engine - log p by the trainer, over the engine's samples; with "
        "rollout.top_p and its like the bias of what is cut off, too",
    ),
    Metric(
        "correction/engine_kl", "nats", "token mean of k3 of the engine's policy from the trainer's before the update"
    ),
    Metric(
        "correction/ess", "share", "effective sample size of its tokens under their weights; 1 if all weigh the same"
    ),
    Metric("correction/weight_mean", "1", "mean weight of its tokens"),
    Metric("correction/weight_max", "1", "largest of them"),
    Metric("correction/truncated", "share", "its tokens whose ratio was above the bound of weights"),
    Metric("correction/masked", "share", "its tokens that a mask or the veto left out"),
    Metric("engine/canary_logprob_diff", "nats", "mean gap on the fixed probe after the step's weights were published"),
    Metric("rollout/engine_restarts", "count", "engines replaced since the last step, because they were lost"),
    Metric("rollout/requests_retried", "count", "requests asked again since then, because their engine was lost"),
    Metric("collapse/triggered_rules", "count", "collapse rules triggered in this step (docs/collapse.md)"),
    Metric("kl/reference", "nats", "token mean of the KL estimate to the reference, where it is paid in the reward"),
    Metric("kl/coefficient", "1", "what one nat of it costs"),
    Metric("val/<set>/total", "points", "mean reward of the replies to a validation set (rollout.val_kwargs)"),
    Metric("val/<set>/exact", "share", "replies that get the highest reward there is"),
    Metric("val/<set>/<part>", "points", "mean of one named part of the reward"),
    Metric("eval/<category>/score", "share", "a benchmark's category or aggregate, greedy (docs/evaluation.md)"),
    Metric("eval/<category>/missing", "count", "tasks of it that could not be judged, and are in no figure"),
    Metric("val/demonstrations/loss", "nats", "token mean of -log p over the validation demonstrations (main_sft)"),
    Metric("time/<phase>_s", "s", "wall time of one phase of the step"),
    Metric("time/<phase>_cpu_s", "s", "processor time of the controller process in it, worker processes left out"),
    Metric("time/step_s", "s", "wall time of the step"),
    Metric("time/overhead_s", "s", "wall time of the step outside every phase"),
    Metric("perf/rollout_tokens_per_s", "tokens/s", "tokens that the policy wrote, by the time of the rollout phase"),
    Metric("perf/update_tokens_per_s", "tokens/s", "tokens through the update, prompts too, by the time of that phase"),
    Metric("perf/tokens_per_s", "tokens/s", "tokens of all samples, prompts too, by the wall time of the step"),
    Metric("perf/mfu", "share", "model FLOPs of the update by what the devices could do in its time"),
    Metric("memory/trainer_gib", "GiB", "peak memory of the largest training rank: of its device; resident on CPU"),
    Metric("memory/driver_gib", "GiB", "resident memory of the controller process"),
)
_FREE = {"data_source": r".+", "set": r".+", "category": r".+"}  # these may hold slashes


def _pattern(name: str) -> str:
    pieces = re.split(r"<(\w+)>", name)  # text, placeholder, text, ...
    return "".join(
        re.escape(piece) if number % 2 == 0 else _FREE.get(piece, r"[^/]+") for number, piece in enumerate(pieces)
    )


_KNOWN = re.compile("|".join(_pattern(metric.name) for metric in METRICS))
_FIXED = frozenset(metric.name for metric in METRICS)


def known(name: str) -> bool:
    """Whether the table has this name, placeholders filled in."""
    return "<" not in name and _KNOWN.fullmatch(name) is not None


def reward_parts(metrics: Mapping[str, float]) -> dict[str, float]:
    """Part -> value, of the metrics that the table knows as reward/<part> alone."""
    parts = {name: value for name, value in metrics.items() if re.fullmatch("reward/[^/]+", name)}
    return {name.removeprefix("reward/"): value for name, value in parts.items() if name not in _FIXED}


def markdown() -> str:
    """The page docs/metrics.md."""
    rows = [f"| `{metric.name}` | {metric.unit} | {metric.meaning} |" for metric in METRICS]
    return "\n".join([INTRODUCTION, "| name | unit | meaning |", "|---|---|---|", *rows, ""])


if __name__ == "__main__":
    sys.stdout.write(markdown())
