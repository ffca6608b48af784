"""The verdict on a run in three sentences: did it learn, what did validation show, and what to look at first.

A run that did not learn has its reason in the third, by its own numbers, with a command that helps.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolrl.analysis.report.curves import GAP, MISSING, Validated, validation
from toolrl.analysis.report.folder import RunFolder, read_run
from toolrl.analysis.report.intervals import mean, welch_half
from toolrl.analysis.report.reasons import lowest_correctness
from toolrl.analysis.report.rows import number
from verl.text import counted

WINDOW = 5  # steps at each end of a run, at least, for a comparison
# Presets whose advantages are not relative to the group.
GROUP_FREE = ("ppo", "remax", "reinforce_pp", "vapo", "raft_pp", "opd")
_SCORES = ("total", "score", "exact")  # metrics of validations that are better if they are higher
_REWARD, _LOSS, _CORRECT = "reward/total", "actor/loss", "reward/correctness"
_EQUAL = "reward/zero_variance_groups"


@dataclass(frozen=True, slots=True)
class _Sign:
    """A metric beyond its limit in the last steps. command: what helps, by the run"""

    metric: str
    limit: float
    advice: str
    command: Callable[[RunFolder], str] = lambda _: ""
    below: bool = False  # whether low values are the problem

    def seen(self, values: Sequence[float]) -> bool:
        return mean(values) < self.limit if self.below else mean(values) > self.limit


def _with_data(name: str) -> Callable[[RunFolder], str]:
    """`toolrl NAME` on the run's model and rows."""

    def command(run: RunFolder) -> str:
        files = run.settings.get("data.train_files")
        listed = ",".join(map(str, files)) if isinstance(files, list) else str(files)
        model = run.settings.get("model.path")
        return shlex.join(["toolrl", name, f"model.path={model}", f"data.train_files=[{listed}]"])

    return command


def _lower(setting: str, factor: float) -> Callable[[RunFolder], str]:
    """The setting times the factor."""

    def command(run: RunFolder) -> str:
        value = number(run.settings.get(setting))
        return "" if value is None else f"{setting}={value * factor:g}"

    return command


# Checked in this order: the first that holds is what to look at first.
_SIGNS = (
    _Sign("collapse/triggered_rules", 0.0, "a collapse rule is triggered; see the marks on the curves"),
    _Sign("reward/infrastructure_faults", 0.0, "responses are dropped for infrastructure faults; see the logs"),
    _Sign("tools/unavailable", 0.0, "tool calls fail because a service is unavailable"),
    _Sign("engine/logprob_diff_mean", GAP, "engine and trainer disagree; see engine/logprob_diff_mean"),
    _Sign(
        *("response_length/clip_ratio", 0.3),
        "many responses reach the length limit; see response_length/clip_ratio",
        _lower("data.max_response_length", 2),
    ),
    _Sign(
        *(_EQUAL, 0.6),
        "most groups have equal returns, so their group-relative advantages are zero; filter for them",
        _with_data("probe"),
    ),
    _Sign(
        *("tools/parse_errors_mean", 0.3),
        "many tool calls cannot be parsed; filter the rollouts for the lowest reward",
        _with_data("sft"),
    ),
)
# Only of a run that did not learn.
_CAUSES = (
    _Sign(
        "reward/format", 0.5, "few responses have the format that the reward asks for", _with_data("sft"), below=True
    ),
    _Sign(
        *("actor/clip_fraction", 0.3),
        "the ratio of new to old policy is clipped at many tokens: the updates are too large",
        _lower("actor.optim.lr", 0.3),
    ),
)


def verdict_of(folder: Path) -> list[str]:
    """The verdict on the run in this folder. Raises ConfigError if there is none."""
    run = read_run(folder)
    return verdict(run, validation(run))


def verdict(run: RunFolder, validated: Sequence[Validated]) -> list[str]:
    """Did the run learn, what did validation show, and what to look at first: a sentence each."""
    learned, sentence = _reward(run, _direction(validated))
    return [sentence, _validation(validated), _first_look(run, learned)]


def _direction(validated: Sequence[Validated]) -> int:
    """1 or -1 if the first metric of the validation rose or fell beyond its interval, else 0."""
    for name, before, after, half in validated[:1]:
        if half is not None and abs(after - before) > half and name.rpartition("/")[2] in _SCORES:
            return 1 if after > before else -1
    return 0


def _reward(run: RunFolder, by_validation: int) -> tuple[bool, str]:
    """(whether it learned, the sentence): by the loss, where there is no reward (`toolrl sft`).

    by_validation: see `_direction`; it decides, since both validations ask the same tasks. The first steps of the mean
    reward may hold most of what was learned, and its tasks differ from step to step.
    """
    rewarded = any(_REWARD in row for row in run.rows) or not any(_LOSS in row for row in run.rows)
    name, metric, better = ("reward", _REWARD, 1) if rewarded else ("loss", _LOSS, -1)
    values = _values(run.rows, metric)
    count = max(WINDOW, len(values) // 5)
    if not any(row["step"] for row in run.rows):  # step 0 is the validation before the training
        return False, "No step is finished yet."
    if run.rows and not values:
        return False, "No reward is logged."
    if len(values) < 2 * count:
        return False, f"Too few steps for a verdict on the {name}: {len(values)}, and at least {2 * WINDOW} are needed."
    first, last = values[:count], values[-count:]
    change = mean(last) - mean(first)
    half = welch_half(first, last)
    measured = abs(change) > half
    verb = ("rose" if change > 0 else "fell") if measured else "did not change measurably"
    by_reward = (1 if change * better > 0 else -1) if measured else 0
    direction = by_validation or by_reward
    outcome = {1: "The run learned", 0: "The run did not learn", -1: "The run got worse"}[direction]
    source = ", by its validation" if direction != by_reward else ""
    return direction > 0, (
        f"{outcome}{source}. The mean {name} {verb}: from {mean(first):.3f} in the first {count} steps to "
        f"{mean(last):.3f} in the last {count}, a change of {change:+.3f} "
        f"(95 % interval {change - half:+.3f} to {change + half:+.3f})."
    )


def _validation(validated: Sequence[Validated]) -> str:
    compared = [each for each in validated if not each[0].endswith(f"/{MISSING}")]
    if not compared:
        return "There was no validation before and after the training."
    name, before, after, half = compared[0]
    interval = "" if half is None else f" (95 % interval {after - before - half:+.3f} to {after - before + half:+.3f})"
    return f"Validation, {name}: from {before:.3f} to {after:.3f}, a change of {after - before:+.3f}{interval}."


def _first_look(run: RunFolder, learned: bool) -> str:
    recent = run.rows[-WINDOW:]
    if not learned and _never_right(run):
        lowest = _values(run.rows, _CORRECT)[-1]
        problem = f"No response had a right call: {_CORRECT} is at its minimum, {lowest:g}, in every step"
        return f"{problem}. The policy needs demonstrations first: {_with_data('sft')(run)}"
    for sign in (*_SIGNS, *(() if learned else _CAUSES)):
        values = _values(recent, sign.metric)
        if sign.metric == _EQUAL and run.settings.get("algorithm.name") in GROUP_FREE:
            continue
        if values and sign.seen(values):
            command = f" Try {look}" if not learned and (look := sign.command(run)) else ""
            mean_of = f"It is {mean(values):.3g} in the last {counted(len(recent), 'step')}."
            return f"Look first: {sign.advice}. {mean_of}{command}"
    if not any(_REWARD in row for row in run.rows):
        return "Nothing stands out in the metrics."
    return "Nothing stands out in the metrics: look first at the rollouts of the last step with the lowest rewards."


def _never_right(run: RunFolder) -> bool:
    """Whether the correctness of all steps is the lowest that the reward gives, so none had a right part."""
    rows = [row for row in run.rows if number(row.get(_CORRECT)) is not None]
    lowest = lowest_correctness(run)
    return bool(rows) and lowest is not None and all(row[_CORRECT] <= lowest(row["step"]) + 1e-6 for row in rows)


def _values(rows: Sequence[Any], metric: str) -> list[float]:
    return [value for row in rows if (value := number(row.get(metric))) is not None]
