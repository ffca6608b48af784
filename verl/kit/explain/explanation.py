"""A kept sample, from prompt to loss, as sections of text: recorded values, and the arithmetic that gives them.

Shape legend: A trained tokens of the sample, G rollouts of its group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.kl import KL_ESTIMATORS
from verl.algorithms.losses.policy_loss import LossInputs, TokenLoss
from verl.algorithms.names import KLPlacement, OldLogprobs
from verl.config.load import restored_config
from verl.errors import ConfigError, DataError
from verl.kit.explain.formulas import Known, advantage_formula
from verl.kit.explain.penalty import is_penalized, kl_of_tokens
from verl.kit.report.folder import RunFolder, parsed
from verl.kit.report.loss import ComputedLoss, computed_loss, share_of, sum_check
from verl.kit.report.reasons import Reasons, call_lines, reasons_of
from verl.tracking.samples import KeptSample, StepSamples, read_samples, samples_path
from verl.trainer.builders.algorithm import build_algorithm

_RELATIVE = 1e-3  # of the largest token loss
_SHOWN_TOKENS = 8
_SHOWN_CHARS = 600
_REUSED_FROM = 32  # steps before, at most, in which a reused rollout is looked for


@dataclass(frozen=True, slots=True)
class Explanation:
    """sections: (title, lines); failed: checks whose two sides differ"""

    sections: Sequence[tuple[str, Sequence[str]]]
    failed: Sequence[str]


def read_step(run: RunFolder, step: int) -> StepSamples:
    """Raises DataError if the step has no file of kept samples."""
    if step not in (known := run.kept_steps()):
        expected = f"one of {known[0]} to {known[-1]}" if known else "a run with trainer.samples_kept above 0"
        raise DataError(f"has no samples of step {step}", expected, file=str(run.folder))
    return read_samples(samples_path(run.folder, step))


def summary(kept: StepSamples) -> list[str]:
    """A line per kept sample, with its number."""
    return [
        f"{number:3}  {each.task_id} #{each.index}"
        + (f" segment {each.segment + 1} of {each.num_segments}" if each.num_segments > 1 else "")
        + f": reward {each.reward:.4g}, share of the loss {_share(kept.loss.get(each.row))}"
        for number, each in enumerate(kept.samples)
    ]


def _share(share: float | None) -> str:
    return "none (not computed: its advantage is zero)" if share is None else f"{share:.6g}"


def explain(run: RunFolder, step: int, number: int, gradient: bool = False) -> Explanation:
    """number: of the kept sample in the step's file; gradient: compute its share of the gradient norm, by a replay

    Raises DataError or ConfigError if there is no such sample, or no record for the gradient.
    """
    kept = read_step(run, step)
    if not 0 <= number < len(kept.samples):
        raise ConfigError(f"--sample must be from 0 to {len(kept.samples) - 1} in step {step}, got {number}")
    sample = kept.samples[number]
    rollouts = [row for text in run.transcript(step) if (row := parsed(text)) is not None]
    rollout = _reused(run, step, sample) if sample.line is None else _rollout(run, step, sample.line)
    algorithm = _algorithm(run)
    logged = next((row.get("actor/loss") for row in run.rows if row["step"] == step), None)
    beta = next((row.get("kl/coefficient") or 0.0 for row in run.rows if row["step"] == step), 0.0)
    computed, failed = computed_loss(kept), list[str]()
    sections = [
        ("Texts", _texts(run, rollout, sample)),
        ("Reward", _reward(rollout, sample, reasons_of(run))),
        ("Group and advantage", _advantage(sample, rollout, kept, rollouts, algorithm, beta, failed)),
        ("Tokens", _tokens(sample, kept, algorithm, computed, failed)),
        ("Share of the loss", _loss(sample, kept, computed, logged, failed)),
        ("Share of the gradient norm", _gradient(run, step, sample, gradient)),
    ]
    if unknown := _unknown(sample):
        sections.append(("Not known", unknown))
    return Explanation(sections, failed)


def _rollout(run: RunFolder, step: int, line: int) -> dict[str, Any] | None:
    return next((parsed(text) for text in islice(run.transcript(step), line, line + 1)), None)


def _reused(run: RunFolder, step: int, sample: KeptSample) -> dict[str, Any] | None:
    """The rollout of an earlier step: the newest with the task, the index and the reward."""
    earlier = [each for each in run.transcript_steps() if each < step]
    for each in earlier[: -_REUSED_FROM - 1 : -1]:
        for row in map(parsed, run.transcript(each)):
            known = row is not None and (row.get("task_id"), row.get("index")) == (sample.task_id, sample.index)
            if row and known and math.isclose(row.get("reward") or 0.0, sample.reward, abs_tol=1e-6):
                return row
    return None


def _algorithm(run: RunFolder) -> Algorithm:
    if not run.settings:
        raise DataError("cannot be read", "the settings of the run", file=str(run.folder / "config.yaml"))
    config = restored_config(run.settings)
    return build_algorithm(config.algorithm, config.data.max_response_length, config.rollout.max_staleness)


def _texts(run: RunFolder, rollout: Mapping[str, Any] | None, sample: KeptSample) -> list[str]:
    counts = f"{len(sample.mask)} tokens, {int(sample.mask.sum())} of them trained"
    if rollout is None:
        return [counts, "the transcript of this rollout is not in the step's file"]
    uses = [f"{use['name']}: {use['status']}, {use['seconds']:.3g} s" for use in rollout.get("tool_uses", ())]
    lines = []
    for message in (*rollout["prompt"], *rollout["responses"]):
        lines.append(f"{message['role']}: {_cut(str(message['content']))}")
        if message["role"] == "assistant":
            lines += [f"  {_cut(line)}" for line in call_lines(run, message)]
    lines += [f"gold answer: {_cut(str(rollout['answer']))}", *(f"outcome of a call: {use}" for use in uses)]
    if sample.line is None:
        lines.append(f"generated for step {rollout['step']}, whose report shows it, and trained again here")
    return [*lines, counts]


def _cut(text: str) -> str:
    left = len(text) - _SHOWN_CHARS
    shown = text if left <= 0 else f"{text[:_SHOWN_CHARS]} [{left} more characters]"
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in shown)


def _reward(rollout: Mapping[str, Any] | None, sample: KeptSample, reasons: Reasons | None) -> list[str]:
    if rollout is None:
        return [f"reward for training: {sample.reward:.6g}"]
    total, parts = rollout["score"]["total"], rollout["score"]["parts"]
    named = [f"{name} {value:.4g}" for name, value in parts.items()]
    lines = [_cut(line) for line in reasons.of(rollout)] if reasons else []
    if parts and math.isclose(sum(parts.values()), total, abs_tol=1e-6):
        lines.append(f"{' + '.join(named)} = {total:.6g}")
    elif parts:
        lines.append(f"The total is not the sum of what the reward reports: {', '.join(named)}")
    lines.append(f"total: {total:.6g}; for training, after shaping in the group and penalties: {sample.reward:.6g}")
    turns = [value for value in rollout.get("turn_rewards", ()) if value is not None]
    return [*lines, f"rewards of turns: {_listed(turns)}"] if turns else lines


def _advantage(
    sample: KeptSample,
    rollout: Mapping[str, Any] | None,
    kept: StepSamples,
    rollouts: Sequence[Mapping[str, Any]],
    algorithm: Algorithm,
    beta: float,
    failed: list[str],
) -> list[str]:
    """rollouts: of the step. beta: coefficient of the KL penalty in the reward"""
    returns = np.array(sample.group_returns, dtype=np.float64)
    std = float(returns.std(ddof=1)) if len(returns) > 1 else 0.0
    lines = [f"returns of the group: {_listed(returns.tolist())}; mean {returns.mean():.6g}, std {std:.6g} (n - 1)"]
    recorded = sample.columns["advantages"]
    if not len(recorded):
        return [*lines, "no token is trained"]
    if is_penalized(algorithm, beta):
        lines += _penalty(sample, kept.texts, algorithm, beta)
    turns = [value for value in (rollout or {}).get("turn_rewards", ()) if value is not None]
    shown = f"recorded: {recorded[0]:.6g} on every token"
    if not (recorded == recorded[0]).all():
        shown = f"recorded: from {recorded.min():.6g} to {recorded.max():.6g}"
    options = getattr(algorithm.advantage, "keywords", {})
    known = Known(sample, sample.reward + sum(turns), kept.samples, rollouts, algorithm, options, beta)
    formula = advantage_formula(known)
    if formula is None:
        return [*lines, f"The formula of {algorithm.name} is in docs/algorithms.md (`toolrl algorithms`).", shown]
    if formula.values_A is None:
        return [*lines, formula.text, shown]
    agrees = np.allclose(formula.values_A, recorded, rtol=1e-3, atol=1e-4)
    if not agrees:
        failed.append("advantage")
    value = f" = {formula.values_A:.6g}" if isinstance(formula.values_A, float) else ""
    return [*lines, formula.text + value, shown, "The record agrees." if agrees else "The record differs."]


def _penalty(sample: KeptSample, texts: Mapping[int, str], algorithm: Algorithm, beta: float) -> list[str]:
    """The rewards of the tokens with the largest KL."""
    kl_A, places = kl_of_tokens(sample, algorithm), np.flatnonzero(sample.mask)
    total, last = float(kl_A.sum()), len(kl_A) - 1
    left = sample.reward - beta * total
    lines = [
        f"KL in the reward: a token's reward is -beta * {algorithm.kl.estimator}(p, p_ref), the last one's also r; "
        f"beta = {beta:.6g}",
        f"r - beta * sum(KL) = {sample.reward:.6g} - {beta:.6g} * {total:.6g} = {left:.6g}; the tokens with the "
        "largest KL, and the last:",
    ]
    for at in sorted({*np.abs(kl_A).argsort()[::-1][: _SHOWN_TOKENS - 1].tolist(), last}):
        token, start = texts.get(int(sample.token_ids[places[at]]), ""), sample.reward if at == last else 0.0
        lines.append(
            f"  {places[at]:5} {token!r}: {start:.4g} - {beta:.4g} * {kl_A[at]:.4g} = {start - beta * kl_A[at]:.4g}"
        )
    return lines


def _tokens(
    sample: KeptSample, kept: StepSamples, algorithm: Algorithm, computed: ComputedLoss | None, failed: list[str]
) -> list[str]:
    """The loss of every token again from the recorded log-probs, and the tokens with the largest shares."""
    columns = {name: torch.from_numpy(values.copy()) for name, values in sample.columns.items()}
    if "loss" not in columns:
        return ["The update did not compute this sample: its advantage is zero, so is its gradient."]
    if algorithm.selection is not None:
        return [f"{algorithm.name} treats some tokens of a mini-batch differently; which ones is not kept."]
    old_A = _old_logprobs(columns, algorithm)
    token = algorithm.policy_loss(
        LossInputs(columns["logprobs"], old_A, columns["advantages"], torch.zeros(len(old_A), dtype=torch.long))
    )
    unweighted_A, terms = _unweighted(token, columns, algorithm)
    sums = kept.sums.get(sample.row, ())
    lines = [f"loss of a token = weight * ({' '.join(terms)})"]
    if len(sums) > 1:
        lines.append(f"of the first of {len(sums)} epochs, as are all values of tokens; the others are not kept")
    if computed is None:
        lines.append("the weight is not known: the step was recorded without the settings and token counts of its loss")
    else:
        lines.append(f"weight = {computed.formula(sample.row)}")
        off_A = computed.weight(sample.row) * unweighted_A - columns["loss"]
        off, largest = float(off_A.abs().max()), float(columns["loss"].abs().max())
        if off > _RELATIVE * largest or not math.isclose(float(unweighted_A.double().sum()), sums[0], abs_tol=1e-3):
            failed.append("token losses")
        lines.append(f"computed again so, every token differs by at most {off:.2g}; the largest is {largest:.2g}")
    clipped = token.metrics_T.get("clip_fraction")
    if clipped is not None:
        lines.append(f"clipped: {int(clipped.sum())} of {len(old_A)} tokens")
    ratio = _ratios(token, algorithm)
    return [*lines, *ratio, *_token_table(sample, kept.texts, columns, token)]


def _unweighted(token: TokenLoss, columns: Mapping[str, Tensor], algorithm: Algorithm) -> tuple[Tensor, list[str]]:
    """([A] token losses without weight, their terms), as in `policy_loss` of the policy worker."""
    loss_A = token.loss_T * columns.get("importance", torch.ones(()))
    loss_A = loss_A - algorithm.entropy_coefficient * columns["entropy"]
    terms = ["importance weight * policy loss" if "importance" in columns else "policy loss"]
    if algorithm.entropy_coefficient:
        terms.append(f"- {algorithm.entropy_coefficient:g} * entropy")
    if algorithm.kl.placement is KLPlacement.LOSS:
        kl_A = KL_ESTIMATORS[algorithm.kl.estimator](columns["logprobs"], columns["ref_logprobs"])
        loss_A = loss_A + algorithm.kl.coefficient * kl_A
        terms.append(f"+ {algorithm.kl.coefficient:g} * {algorithm.kl.estimator}(p, p_ref)")
    return loss_A, terms


def _ratios(token: TokenLoss, algorithm: Algorithm) -> list[str]:
    ratio_A = token.ratio_T
    if ratio_A is None:
        return [f"{algorithm.name} uses no importance ratio"]
    low, high = float(ratio_A.min()), float(ratio_A.max())
    if len(ratio_A) > 1 and math.isclose(low, high, rel_tol=1e-6):
        return [f"ratio in the loss: {low:.8g} on every token"]
    return [f"ratio in the loss: from {low:.6g} to {high:.6g}"]


def _old_logprobs(columns: Mapping[str, Tensor], algorithm: Algorithm) -> Tensor:
    """[A] the denominator of the ratio, as in `policy_loss` of the policy worker."""
    if algorithm.old_logprobs is OldLogprobs.ROLLOUT:
        return columns["rollout_logprobs"]
    return columns.get("old_logprobs", columns["logprobs"])


def _token_table(
    sample: KeptSample, texts: Mapping[int, str], columns: Mapping[str, Tensor], token: TokenLoss
) -> list[str]:
    places = np.flatnonzero(sample.mask)
    largest = sorted(columns["loss"].abs().argsort(descending=True)[:_SHOWN_TOKENS].tolist())
    clipped = token.metrics_T.get("clip_fraction")
    shown = {
        "log p engine": columns["rollout_logprobs"],
        "trainer": columns["logprobs"],
        "ratio": token.ratio_T,
        "advantage": columns["advantages"],
        "importance": columns.get("importance"),
        "loss": columns["loss"],
    }
    digits = {"ratio": 8}  # GSPO clips at 1.0004
    lines = [f"the {len(largest)} tokens with the largest shares:"]
    for at in largest:
        values = ", ".join(
            f"{name} {float(each[at]):.{digits.get(name, 4)}g}" for name, each in shown.items() if each is not None
        )
        text = texts.get(int(sample.token_ids[places[at]]), "")
        lines.append(f"  {places[at]:5} {text!r}: {values}{', clipped' if clipped is not None and clipped[at] else ''}")
    return lines


def _loss(
    sample: KeptSample, kept: StepSamples, computed: ComputedLoss | None, logged: float | None, failed: list[str]
) -> list[str]:
    share, total = share_of(kept, computed, sample.row), sum_check(kept, computed, logged)
    failed += [name for name, check in (("share", share), ("sum of the shares", total)) if check.agrees is False]
    lines = [f"share of this sample: {share.text}"]
    absolute = math.fsum(map(abs, kept.loss.values()))
    if sample.row in kept.loss and absolute:
        lines.append(
            f"that is {abs(kept.loss[sample.row]) / absolute:.2%} of the sum of all shares without their signs"
        )
    return [*lines, f"sum check: {total.text}"]


def _gradient(run: RunFolder, step: int, sample: KeptSample, wanted: bool) -> list[str]:
    if not wanted:
        recorded = (run.folder / "records" / f"step-{step:06d}.npz").exists()
        how = "--gradient repeats the update from its record" if recorded else "the step has no record (trainer.record)"
        return [f"not known: it needs the weights of the step; {how}"]
    from verl.kit.explain.gradient import gradient_share  # imports Ray

    found = gradient_share(run.folder, step, sample.row)
    if found is None:
        return ["0: no update computed this sample: its advantage is zero, or the critic warms up"]
    share = found.share / found.whole if found.whole else 0.0
    return [
        f"share of this sample: {found.share:.6g}, {share:.2%} of the norm {found.whole:.6g} of its update's gradient "
        f"before clipping; the shares of its {found.samples} samples add up to the norm",
        f"the norm of its own gradient is {found.own:.6g}",
    ]


def _unknown(sample: KeptSample) -> list[str]:
    if "old_logprobs" in sample.columns:
        return []
    return ["log-probs before the update: they are the update's own, or the ratio uses the engine's"]


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)
