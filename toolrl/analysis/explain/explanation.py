"""A kept sample, from prompt to loss, as sections of text: what the run recorded, and the arithmetic of its loss.

Shape legend: A trained tokens of the sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from toolrl.algorithms import describe
from toolrl.analysis.explain.tokens import SHOWN, token_lines
from toolrl.analysis.report import rows
from toolrl.analysis.report.folder import RunFolder
from toolrl.analysis.report.loss import LOSSES, ComputedLoss, computed_loss, share_of, sum_check, why_not_computed
from toolrl.analysis.report.reasons import CallReader, Reasons, call_reader, reasons_of
from toolrl.analysis.report.transcript import is_of, rollout_of, rollouts_at
from toolrl.analysis.samples.sample_files import MAX_BYTES, KeptSample, StepSamples, read_samples, samples_path
from verl.algorithms.algorithm import Algorithm
from verl.algorithms.kl import KL_ESTIMATORS
from verl.algorithms.names import KLPlacement
from verl.build.algorithm import algorithm_of
from verl.errors import ConfigError, DataError, VerlError
from verl.text import counted, printable

_SHOWN_CHARS = 600
_REUSED_FROM = 32  # steps before, at most, in which a reused rollout is looked for


@dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation of a sample, for the terminal and the page of the report.

    sections: (title, lines) in the order of reading. A line may hold line breaks, behind which it goes on indented; it
        has no other characters that a terminal interprets
    failed: names of the checks whose two sides differ; empty: the record agrees
    """

    sections: Sequence[tuple[str, Sequence[str]]]
    failed: Sequence[str]


def read_step(run: RunFolder, step: int) -> StepSamples:
    """Raises DataError if the step has no file of kept samples."""
    if step not in (known := run.kept_steps()):
        expected = f"one of {known[0]} to {known[-1]}" if known else "a run with trainer.samples_kept above 0"
        raise DataError(f"has no samples of step {step}", expected, file=str(run.folder))
    return read_samples(samples_path(run.folder, step))


def summary(kept: StepSamples) -> list[str]:
    """A line per kept sample, with its number, and what is left out."""
    without_room = f"{counted(kept.left_out, 'longer sample')} had no room in the file ({MAX_BYTES / 1e6:g} MB)"
    lines = [
        clean(f"{number:3}  {each.task_id} #{each.index}{_segment(each)}: reward {each.reward:.4g}, ")
        + f"share of the loss {_share(kept, each.row)}"
        for number, each in enumerate(kept.samples)
    ]
    return [*lines, without_room] if kept.left_out else lines


def clean(text: str) -> str:
    """Text of a model, a data file or an error for the terminal; what follows a line break cannot pass for our own."""
    return printable(text).replace("\n", "\n    ")


def _segment(sample: KeptSample) -> str:
    return f" segment {sample.segment + 1} of {sample.num_segments}" if sample.num_segments > 1 else ""


def _share(kept: StepSamples, row: int) -> str:
    return f"{kept.loss[row]:.6g}" if row in kept.loss else f"none (not computed: {why_not_computed(kept)})"


def explain(run: RunFolder, step: int, number: int, gradient: bool = False) -> Explanation:
    """number: of the kept sample in the step's file; gradient: compute its share of the gradient norm, by a replay

    Raises DataError or ConfigError if there is no such sample, or no record for the gradient. What is missing or
    damaged otherwise is in the notes of the run.
    """
    kept = read_step(run, step)
    if not 0 <= number < len(kept.samples):
        raise ConfigError(f"--sample must be from 0 to {len(kept.samples) - 1} in step {step}, got {number}")
    sample = kept.samples[number]
    rollout = _find_reused(run, step, sample) if sample.line is None else _own(run, step, sample, sample.line)
    return Explainer.of(run).explanation(step, kept, computed_loss(kept), number, rollout, gradient)


def _own(run: RunFolder, step: int, sample: KeptSample, line: int) -> dict[str, Any] | None:
    rollout = rollouts_at(run, step, {line}).get(line)
    if rollout is None or not is_of(sample, rollout):
        run.note(f"transcripts of step {step}: line {line + 1}, the rollout of this sample, is missing or damaged")
        return None
    return rollout


def _find_reused(run: RunFolder, step: int, sample: KeptSample) -> dict[str, Any] | None:
    """The rollout of an earlier step: the newest with the task, the index and the reward."""
    earlier = [each for each in run.transcript_steps() if each < step]
    for each in earlier[: -_REUSED_FROM - 1 : -1]:
        for row in map(rollout_of, run.transcript(each)):
            if row and is_of(sample, row) and math.isclose(row.get("reward") or 0.0, sample.reward, abs_tol=1e-6):
                return row
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explainer:
    """Explains the samples of a run.

    algorithm: None if it cannot be built, with the reason in `unknown`; logged: metrics by step
    """

    run: RunFolder
    logged: Mapping[int, Mapping[str, Any]]
    algorithm: Algorithm | None
    unknown: str
    reasons: Reasons | None
    calls: CallReader

    @classmethod
    def of(cls, run: RunFolder) -> Explainer:
        algorithm, unknown = None, "the settings of the run (config.yaml) cannot be read"
        try:
            algorithm = _algorithm(run) if run.settings else None
        except VerlError as error:
            unknown = str(error)
        logged = {row["step"]: row for row in run.rows}
        reasons, calls = reasons_of(run), call_reader(run)
        return cls(run=run, logged=logged, algorithm=algorithm, unknown=unknown, reasons=reasons, calls=calls)

    def explanation(
        self,
        step: int,
        kept: StepSamples,
        computed: ComputedLoss | None,
        number: int,
        rollout: Mapping[str, Any] | None,
        gradient: bool = False,
    ) -> Explanation:
        """computed: the loss of the step; rollout: of the sample, from a transcript, or None if it is not known

        gradient: as in `explain`, and so are the errors
        """
        sample, failed = kept.samples[number], list[str]()
        row = self.logged.get(step, {})
        beta, *losses = (rows.number(row.get(name)) for name in ("kl/coefficient", *LOSSES))
        sections = [
            ("Texts", self._texts(rollout, sample)),
            ("Reward", _reward(rollout, sample, self.reasons)),
            ("Group and advantage", self._advantage(step, sample, kept, beta)),
            ("Tokens", self._tokens(step, sample, kept, computed, failed)),
            ("Share of the loss", _loss(sample, kept, computed, losses, failed)),
            ("Share of the gradient norm", _gradient(self.run, step, kept, sample, gradient)),
        ]
        if unknown := _unknown(sample):
            sections.append(("Not known", unknown))
        return Explanation([(title, [clean(line) for line in lines]) for title, lines in sections], failed)

    def _texts(self, rollout: Mapping[str, Any] | None, sample: KeptSample) -> list[str]:
        counts = f"{counted(len(sample.mask), 'token')}, {int(sample.mask.sum())} of them trained"
        if rollout is None:
            return [counts, "the transcript of this rollout is not in the step's file"]
        uses = [
            f"{use.get('name')}: {use.get('status')}, {_seconds(use.get('seconds'))}"
            for use in rollout.get("tool_uses", ())
        ]
        lines = []
        for message in (*rollout.get("prompt", ()), *rollout["responses"]):
            lines.append(f"{message.get('role')}: {_cut(message.get('content', ''))}")
            if message.get("role") == "assistant":
                lines += [f"  {_cut(line)}" for line in self.calls.lines(message)]
        lines.append(f"gold answer: {_cut(str(rollout.get('answer')))}")
        lines += [f"outcome of a call: {_cut(use)}" for use in uses]
        if sample.line is None:
            lines.append(f"generated for step {rollout.get('step')}, whose report shows it, and trained again here")
        return [*lines, counts]

    def _advantage(self, step: int, sample: KeptSample, kept: StepSamples, beta: float | None) -> list[str]:
        """beta: coefficient of the KL penalty in the reward"""
        algorithm, recorded, lines = self.algorithm, sample.columns.get("advantages", np.empty(0)), _group(sample)
        if not len(recorded):
            return [*lines, "no token is trained"]
        if algorithm is not None:
            if algorithm.kl.placement is KLPlacement.REWARD and beta is not None:
                lines += _penalty(sample, kept.texts, algorithm, beta)
            lines.append(f"estimator: {describe(algorithm.advantage)}; docs/algorithms.md has its formula")
            lines += _of_teacher(sample, algorithm)
        if sample.baseline is not None:
            lines.append(f"baseline, the reward of the greedy response: {sample.baseline:.6g}")
        if {"values", "returns"} <= sample.columns.keys():
            value, target = (float(sample.columns[name][0]) for name in ("values", "returns"))
            lines.append(f"critic on the first token: value {value:.6g}, target {target:.6g}")
        if kept.whitening is not None:
            mean, std = kept.whitening
            lines.append(f"whitened over the trained tokens of the step: mean {mean:.6g}, std {std:.6g}")
        return [*lines, _format_recorded(recorded), _replay(self.run, step)]

    def _tokens(
        self, step: int, sample: KeptSample, kept: StepSamples, computed: ComputedLoss | None, failed: list[str]
    ) -> list[str]:
        if self.algorithm is None:
            return [f"not computed: {self.unknown}"]
        bonus = rows.number(self.logged.get(step, {}).get("actor/entropy_coefficient"))  # if it adapts
        algorithm = self.algorithm if bonus is None else replace(self.algorithm, entropy_coefficient=bonus)
        return token_lines(sample, kept, algorithm, computed, failed)


def _algorithm(run: RunFolder) -> Algorithm:
    """Without the run's own filters, which no sample is explained by."""
    config = run.config("algorithm.name")
    algorithm = replace(config.algorithm, filters=None, max_resample_rounds=None)
    return algorithm_of(replace(config, algorithm=algorithm))


def _seconds(seconds: Any) -> str:
    return f"{seconds:.3g} s" if isinstance(seconds, int | float) else "no time recorded"


def _cut(text: str) -> str:
    left = len(text) - _SHOWN_CHARS
    return text if left <= 0 else f"{text[:_SHOWN_CHARS]} [{counted(left, 'more character')}]"


def _reward(rollout: Mapping[str, Any] | None, sample: KeptSample, reasons: Reasons | None) -> list[str]:
    score = (rollout or {}).get("score") or {}
    total, parts = score.get("total"), score.get("parts", {})
    if rollout is None or total is None:
        return [f"reward for training: {sample.reward:.6g}"]
    named = [f"{name} {value:.4g}" for name, value in parts.items()]
    lines = [_cut(line) for line in reasons.of(rollout)] if reasons else []
    if parts and math.isclose(sum(parts.values()), total, abs_tol=1e-6):
        lines.append(f"{' + '.join(named)} = {total:.6g}")
    elif parts:
        lines.append(f"The total is not the sum of what the reward reports: {', '.join(named)}")
    lines.append(f"total: {total:.6g}; for training, after shaping in the group and penalties: {sample.reward:.6g}")
    turns = [value for value in rollout.get("turn_rewards", ()) if value is not None]
    return [*lines, f"rewards of turns: {_format_values(turns)}"] if turns else lines


def _group(sample: KeptSample) -> list[str]:
    returns = np.array(sample.group_returns, dtype=np.float64)
    if len(returns) < 2:
        return [f"the group has one response, with return {value:.6g}" for value in returns.tolist()]
    std = float(returns.std(ddof=1))
    return [
        f"returns of the group: {_format_values(returns.tolist())}; mean {returns.mean():.6g}, std {std:.6g} (n - 1)"
    ]


def _format_recorded(advantages_A: npt.NDArray[np.float32]) -> str:
    if (advantages_A == advantages_A[0]).all():
        return f"recorded advantage: {advantages_A[0]:.6g} on every token"
    return f"recorded advantage: from {advantages_A.min():.6g} to {advantages_A.max():.6g}"


def _penalty(sample: KeptSample, texts: Mapping[int, str], algorithm: Algorithm, beta: float) -> list[str]:
    """The rewards of the tokens with the largest KL, by the log-probs that sampled: those before the update, or the
    engine's where the step had no such pass."""
    sampling_A = sample.columns.get("old_logprobs", sample.columns.get("rollout_logprobs"))
    if sampling_A is None or "ref_logprobs" not in sample.columns:
        return []
    pair = (torch.from_numpy(each.astype(np.float64)) for each in (sampling_A, sample.columns["ref_logprobs"]))
    kl_A, places = KL_ESTIMATORS[algorithm.kl.estimator](*pair).numpy(), np.flatnonzero(sample.mask)
    rewards_A = sample.columns.get("rewards", np.zeros(len(kl_A)))
    reward, total, last = float(rewards_A.sum()), float(kl_A.sum()), len(kl_A) - 1
    lines = [
        f"KL in the reward: a token's reward is r_t - beta * {algorithm.kl.estimator}(p, p_ref), r_t is the episode's "
        f"reward on its last token and a turn's on the turn's last; beta = {beta:.6g}",
        f"r - beta * sum(KL) = {reward:.6g} - {beta:.6g} * {total:.6g} = {reward - beta * total:.6g}; the tokens with "
        "the largest KL, and the last:",
    ]
    for at in sorted({*np.abs(kl_A).argsort()[::-1][: SHOWN - 1].tolist(), last}):
        token, start = texts.get(int(sample.token_ids[places[at]]), ""), float(rewards_A[at])
        lines.append(
            f"  {places[at]:5} {token!r}: {start:.4g} - {beta:.4g} * {kl_A[at]:.4g} = {start - beta * kl_A[at]:.4g}"
        )
    return lines


def _of_teacher(sample: KeptSample, algorithm: Algorithm) -> list[str]:
    """The teacher's part of the advantages, by the log-probs that sampled, as in `_penalty`."""
    sampling_A = sample.columns.get("old_logprobs", sample.columns.get("rollout_logprobs"))
    if sampling_A is None or "teacher_logprobs" not in sample.columns:
        return []
    gap_A = sample.columns["teacher_logprobs"] - sampling_A
    mean, low, high = (float(each) for each in (np.nanmean(gap_A), np.nanmin(gap_A), np.nanmax(gap_A)))
    return [
        f"plus {algorithm.teacher_weight:.6g} * (log p_teacher - log p): the difference is from {low:.4g} to "
        f"{high:.4g}, {mean:.4g} on average"
    ]


def _replay(run: RunFolder, step: int) -> str:
    if not _has_record(run, step):
        return "trainer.record=true keeps a record of every step, from which `toolrl replay` computes it again"
    return f"`toolrl replay {run.folder} --step {step}` computes the step again from its record"


def _has_record(run: RunFolder, step: int) -> bool:
    return (run.folder / "records" / f"step-{step:06d}.npz").exists()


def _loss(
    sample: KeptSample,
    kept: StepSamples,
    computed: ComputedLoss | None,
    losses: Sequence[float | None],
    failed: list[str],
) -> list[str]:
    share, total = share_of(kept, computed, sample.row), sum_check(kept, computed, *losses)
    failed += [name for name, check in (("share", share), ("sum of the shares", total)) if check.agrees is False]
    lines = [f"share of this sample: {share.text}"]
    absolute = math.fsum(map(abs, kept.loss.values()))
    if sample.row in kept.loss and absolute:
        lines.append(
            f"that is {abs(kept.loss[sample.row]) / absolute:.2%} of the sum of all shares without their signs"
        )
    return [*lines, f"sum check: {total.text}"]


def _gradient(run: RunFolder, step: int, kept: StepSamples, sample: KeptSample, compute: bool) -> list[str]:
    if not compute:
        how = "--gradient repeats the update from its record"
        missing = "the step has no record (trainer.record)"
        return [f"not known: it needs the weights of the step; {how if _has_record(run, step) else missing}"]
    from toolrl.analysis.explain.gradient import gradient_share  # imports Ray

    gradient = gradient_share(run.folder, step, sample.row, run.user_code)
    if gradient is None:
        return [f"0: no update computed this sample: {why_not_computed(kept)}"]
    share = gradient.share / gradient.whole if gradient.whole else 0.0
    return [
        f"share of this sample: {gradient.share:.6g}, {share:.2%} of the norm {gradient.whole:.6g} of its update's "
        f"gradient before clipping; the shares of its {gradient.samples} samples add up to the norm",
        f"the norm of its own gradient is {gradient.own:.6g}",
    ]


def _unknown(sample: KeptSample) -> list[str]:
    if "old_logprobs" in sample.columns:
        return []
    if "loss" not in sample.columns:
        return ["log-probs of the trainer: no update computed them"]
    return ["log-probs before the update: they are the update's own, or the ratio uses the engine's"]


def _format_values(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)
