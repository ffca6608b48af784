"""The losses of a sample's tokens again from its recorded log-probs, by the algorithm's own loss.

Shape legend: A trained tokens of the sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from toolrl.analysis.report.loss import ComputedLoss, why_not_computed
from toolrl.analysis.samples.sample_files import KeptSample, StepSamples
from verl.algorithms.algorithm import Algorithm
from verl.algorithms.correction import Correction, token_weights
from verl.algorithms.kl import loss_divergence
from verl.algorithms.losses.policy_loss import LossInputs, TokenLoss
from verl.algorithms.names import KLPlacement, Level, OldLogprobs
from verl.text import counted

SHOWN = 8  # tokens
_RELATIVE = 1e-5  # error of a token's loss: a few 32-bit operations, exponentials of log ratios up to 20 among them
_ULP = 2.0**-24  # relative rounding error of one addition with 32 bits
_CLIPS = {"clip_fraction": "clipped", "dual_clip_fraction": "dual clip"}  # metric of the loss -> its name here


def token_lines(
    sample: KeptSample, kept: StepSamples, algorithm: Algorithm, computed: ComputedLoss | None, failed: list[str]
) -> list[str]:
    """The arithmetic of the token losses, and the tokens with the largest shares."""
    columns = {name: torch.from_numpy(values.copy()) for name, values in sample.columns.items()}
    if "loss" not in columns:
        return [f"No update computed this sample: {why_not_computed(kept)}."]
    needed = {"logprobs", "rollout_logprobs", "entropy", "advantages"}
    if lacking := needed.union({"ref_logprobs"} if algorithm.kl.placement is KLPlacement.LOSS else ()) - columns.keys():
        return [f"not computed: the record of the sample lacks {', '.join(sorted(lacking))}"]
    if algorithm.selection is not None or algorithm.likelihood is not None:
        return [f"{algorithm.name} treats some tokens of a mini-batch differently; which ones is not kept."]
    importance_lines = _importance(columns, algorithm, failed)
    old_A = _old_logprobs(columns, algorithm)
    token = algorithm.policy_loss(
        LossInputs(columns["logprobs"], old_A, columns["advantages"], torch.zeros(len(old_A), dtype=torch.long))
    )
    unweighted_A, terms = _token_losses(token, columns, algorithm)
    sums = kept.sums.get(sample.row, ())
    lines = [f"loss of a token = weight * ({' '.join(terms)})"]
    if len(sums) > 1:
        lines.append(f"of the first of {len(sums)} epochs, as are all values of tokens; the others are not kept")
    if computed is None or not sums:
        lines.append("the weight is not known: the step was recorded without the settings and token counts of its loss")
    else:
        weight, error_A = computed.weight(sample.row), _errors(token, columns, algorithm)
        lines.append(f"weight = {computed.formula(sample.row)}")
        off_A = (weight * unweighted_A - columns["loss"]).abs()
        sum_off = abs(float(unweighted_A.double().sum()) - sums[0])
        if bool((off_A > weight * error_A).any()) or sum_off > float(error_A.double().sum()):
            failed.append("token losses")
        largest = float(columns["loss"].abs().max())
        lines.append(
            f"computed again so, every token differs by at most {float(off_A.max()):.2g}; the largest is {largest:.2g}"
        )
    for metric, name in _CLIPS.items():
        clipped_A = token.metrics_T.get(metric)
        if clipped_A is not None and (metric == "clip_fraction" or clipped_A.any()):
            lines.append(f"{name}: {int(clipped_A.sum())} of {counted(len(old_A), 'token')}")
    if token.ratio_T is not None and "ratio" in columns and _differ(columns["ratio"], token.ratio_T):
        failed.append("ratios")
    return [*lines, *importance_lines, *_ratios(token, algorithm), *_table(sample, kept.texts, columns, token)]


def _differ(recorded_A: Tensor, computed_A: Tensor) -> bool:
    """True if they differ by more than 32-bit rounding."""
    return bool(((recorded_A - computed_A).abs() > (_RELATIVE + _ULP * len(computed_A)) * computed_A.abs()).any())


def _importance(columns: dict[str, Tensor], algorithm: Algorithm, failed: list[str]) -> list[str]:
    """How the importance weights follow from the log-probs, which are those of `columns` from here on."""
    correction = algorithm.correction
    if correction is None:
        return []
    trainer_A = columns.get("old_logprobs", columns["logprobs"])
    sample_A = torch.zeros(len(trainer_A), dtype=torch.long)
    weights = token_weights(correction, trainer_A, columns["rollout_logprobs"], sample_A)
    if "importance" in columns and _differ(columns["importance"], weights.weight_T):
        failed.append("importance weights")
    columns["importance"] = weights.weight_T
    gap = "log p of the trainer before the update - log p of the engine"
    ratio = {None: "1", Level.TOKEN: f"exp({gap})", Level.SEQUENCE: f"exp(sum over the sample of {gap})"}[
        correction.is_level
    ]
    low, high = float(weights.weight_T.min()), float(weights.weight_T.max())
    truncated, rejected = int(weights.truncated_T.sum()), int(weights.masked_T.sum())
    return [
        f"importance weight = min({ratio}, {correction.is_cap:g}): from {low:.6g} to {high:.6g}; "
        f"truncated: {truncated}, rejected (weight 0): {rejected} of {counted(len(trainer_A), 'token')}",
        *_rejections(correction, trainer_A - columns["rollout_logprobs"]),
    ]


def _rejections(correction: Correction, gap_A: Tensor) -> list[str]:
    """Describes rejection and veto, which set weights to 0.

    gap_A: log ratios of trainer and engine; NaN where the engine did not sample
    """
    lines = []
    if correction.rejection_level is not None:
        of = {
            Level.TOKEN: "the ratio of the token",
            Level.SEQUENCE: "the ratio of the sequence",
            Level.GEOMETRIC: "the ratio as a geometric mean",
            Level.BINARY_KL: "e^KL of the token",
        }
        bounds = f"{correction.rejection_lower:g} to {correction.rejection_upper:g}"
        lines.append(f"rejection: weight 0 where {of[correction.rejection_level]} is not from {bounds}")
    if correction.token_veto is not None:
        lines.append(
            f"veto: weight 0 on all tokens if the ratio of one is below {correction.token_veto:g} "
            f"(algorithm.correction.token_veto); the smallest is {float(gap_A.nan_to_num(0.0).min().exp()):.4g}"
        )
    return lines


def _errors(token: TokenLoss, columns: Mapping[str, Tensor], algorithm: Algorithm) -> Tensor:
    """[A] by how much a token's loss may differ: operations with 32 bits in another order.

    Relative to the sum of its terms without their signs, where k3 is a difference of terms of about 1. The ratio of a
    sequence has the error of a mean over its tokens.
    """
    size_A = (token.loss_T * columns.get("importance", torch.ones(()))).abs()
    size_A = size_A + algorithm.entropy_coefficient * columns["entropy"].abs()
    if algorithm.kl.placement is KLPlacement.LOSS:
        gap_A = (columns["logprobs"] - columns["ref_logprobs"]).abs()
        size_A = size_A + algorithm.kl.coefficient * (1.0 + gap_A)
    if algorithm.teacher_top_k:
        size_A = size_A + algorithm.teacher_weight * columns["teacher_kl"].abs()
    return (_RELATIVE + _ULP * len(size_A)) * size_A


def _token_losses(token: TokenLoss, columns: Mapping[str, Tensor], algorithm: Algorithm) -> tuple[Tensor, list[str]]:
    """([A] token losses without weight, their terms), as in `policy_loss` of the policy worker."""
    loss_A = token.loss_T * columns.get("importance", torch.ones(()))
    loss_A = loss_A - algorithm.entropy_coefficient * columns["entropy"]
    terms = ["importance weight * policy loss" if "importance" in columns else "policy loss"]
    if algorithm.entropy_coefficient:
        terms.append(f"- {algorithm.entropy_coefficient:g} * entropy")
    if algorithm.kl.placement is KLPlacement.LOSS:
        logprobs_A, old_A = columns["logprobs"], _old_logprobs(columns, algorithm)
        kl_A = loss_divergence(algorithm.kl.estimator, logprobs_A, columns["ref_logprobs"], old_A)
        loss_A = loss_A + algorithm.kl.coefficient * kl_A
        terms.append(f"+ {algorithm.kl.coefficient:g} * {algorithm.kl.estimator}(p, p_ref)")
    if algorithm.teacher_top_k:
        loss_A = loss_A + algorithm.teacher_weight * columns["teacher_kl"]
        terms.append(f"+ {algorithm.teacher_weight:g} * KL(p, p_teacher) over {algorithm.teacher_top_k} tokens")
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


def _table(sample: KeptSample, texts: Mapping[int, str], columns: Mapping[str, Tensor], token: TokenLoss) -> list[str]:
    places = np.flatnonzero(sample.mask)
    largest = sorted(columns["loss"].abs().argsort(descending=True, stable=True)[:SHOWN].tolist())
    clips = {name: token.metrics_T[metric] for metric, name in _CLIPS.items() if metric in token.metrics_T}
    shown = {
        "log p engine": columns["rollout_logprobs"],
        "trainer": columns["logprobs"],
        "difference": columns["rollout_logprobs"] - columns["logprobs"],
        "ratio": token.ratio_T,
        "advantage": columns["advantages"],
        "importance": columns.get("importance"),
        "loss": columns["loss"],
    }
    digits = {"ratio": 8}  # GSPO clips at 1.0004
    lines = [f"{counted(len(largest), 'token')} with the largest shares:"]
    for at in largest:
        values = ", ".join(
            f"{name} {float(each[at]):.{digits.get(name, 4)}g}" for name, each in shown.items() if each is not None
        )
        text = texts.get(int(sample.token_ids[places[at]]), "")
        clipped = "".join(f", {name}" for name, clipped_A in clips.items() if clipped_A[at])
        lines.append(f"  {places[at]:5} {text!r}: {values}{clipped}")
    return lines
