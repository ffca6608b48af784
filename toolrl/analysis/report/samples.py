"""The kept samples of embedded rollouts as chunks of the page, one each: tokens and the complete explanation.

A chunk is a JSON object. `explanation` is what `toolrl explain` prints of the sample: `sections` is a list of
[title, [line, ..]] in the order of reading, `failed` a list of the names of checks that fail, which is empty where the
record agrees. It is null without torch, which computes losses. Lines may hold line breaks, and text of models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from toolrl.analysis.report.chunks import Chunks, encoded, encoded_bound
from toolrl.analysis.report.folder import RunFolder
from toolrl.analysis.report.loss import LOSSES, Check, computed_loss, share_of, sum_check
from toolrl.analysis.report.rows import number
from toolrl.analysis.report.transcript import is_of, rollouts_at
from toolrl.analysis.samples.sample_files import KeptSample, StepSamples
from verl.text import counted

_DIGITS = 4
_REFUSED = 32  # samples that do not fit; after them no other is tried
_RATIO_DIGITS = 7  # GSPO clips ratios at 1.0004


_Origins = Mapping[tuple[Any, Any], Sequence[tuple[int, float, int]]]


def embed_samples(
    run: RunFolder,
    samples: Mapping[int, Sequence[int | None]],
    meta: Mapping[str, list[Any]],
    chunks: Chunks,
    limit: int,
) -> tuple[int, list[list[int]]]:
    """Add the samples of embedded rollouts that fit, and their chunks to `meta["tokens"]`.

    samples: step -> lines of its kept samples in the step's transcript, steps in the order in which they are tried
    limit: of the size of the chunks
    Returns their number, and those of rollouts that were generated for an earlier step (`Rollouts.reused`).
    """
    place = {key: row for row, key in enumerate(zip(meta["step"], meta["line"], strict=True))}
    origins, explainer = _origins_of(meta), _explainer(run) if samples else None
    added: dict[int, list[tuple[int, int, int]]] = {}  # row of the page -> step, number of the sample, chunk
    reused, refused = [], 0
    for step, lines in samples.items():
        known = any(line is None or (step, line) in place for line in lines)
        if refused >= _REFUSED or not known or (kept := run.samples(step)) is None:
            continue
        for rank, (row, value) in _views(run, step, kept, meta, place, origins, explainer):
            origin = [step, meta["step"][row], meta["line"][row]]
            again = value["segment"] == 0 and origin[0] != origin[1]
            beside = encoded_bound(len(chunks.texts)) + (encoded_bound(origin) if again else 0)
            chunk = chunks.add(encoded(value), limit, beside)
            if chunk is None:
                refused += 1
                continue
            added.setdefault(row, []).append((step, rank, chunk))
            if again:
                reused.append(origin)
    for row, added_rows in added.items():
        meta["tokens"][row] = [chunk for _, _, chunk in sorted(added_rows)]
    return sum(map(len, added.values())), sorted(reused)


def _views(
    run: RunFolder,
    step: int,
    kept: StepSamples,
    meta: Mapping[str, list[Any]],
    place: Mapping[tuple[int, int], int],
    origins: _Origins,
    explainer: Any,
) -> Iterator[tuple[int, tuple[int, dict[str, Any]]]]:
    """(number of the sample, (row of its rollout in the page, what is shown)) of a step's embedded rollouts."""
    computed = computed_loss(kept)
    row_of_step = next((row for row in run.rows if row["step"] == step), {})
    total = sum_check(kept, computed, *(number(row_of_step.get(name)) for name in LOSSES))
    rollouts, strange = rollouts_at(run, step, {sample.line for sample in kept.samples}), 0
    for rank, sample in enumerate(kept.samples):
        row = place.get((step, sample.line)) if sample.line is not None else _origin(sample, step, origins)
        if row is None:
            continue
        if not is_of(sample, {name: meta[name][row] for name in ("task_id", "index")}):
            strange += 1
            continue
        origin, line = meta["step"][row], meta["line"][row]
        rollout = rollouts.get(line) if origin == step else rollouts_at(run, origin, {line}).get(line)
        explained = explainer and asdict(explainer.explanation(step, kept, computed, rank, rollout))
        tokens = _tokens(sample, kept.texts, share_of(kept, computed, sample.row), total)
        yield rank, (row, {**tokens, "step": step, "number": rank, "explanation": explained})
    if strange and not any(note.startswith(f"transcripts of step {step}:") for note in run.notes):
        run.note(
            f"transcripts of step {step}: the rollouts of {counted(strange, 'kept sample')} are not at their lines"
        )


def _explainer(run: RunFolder) -> Any:
    if find_spec("torch") is None:
        return None
    from toolrl.analysis.explain.explanation import (
        Explainer,  # imports torch, which a page without samples does not need
    )

    return Explainer.of(run)


def _origins_of(meta: Mapping[str, list[Any]]) -> _Origins:
    """(task, index) -> (step, reward, row of the page) of every embedded rollout."""
    origins: dict[tuple[Any, Any], list[tuple[int, float, int]]] = {}
    for row, key in enumerate(zip(meta.get("task_id", ()), meta.get("index", ()), strict=True)):
        origins.setdefault(key, []).append((meta["step"][row], meta["reward"][row], row))
    return origins


def _origin(sample: KeptSample, step: int, origins: _Origins) -> int | None:
    """The row of the page of a reused rollout: the newest of an earlier step with its task, index and reward."""
    earlier = [each for each in origins.get((sample.task_id, sample.index), ()) if each[0] < step]
    same = [each for each in earlier if math.isclose(each[1] or 0.0, sample.reward, abs_tol=1e-6)]
    return max(same)[2] if same else None


def _tokens(sample: KeptSample, texts: Mapping[int, str], share: Check, total: Check) -> dict[str, Any]:
    """share: of the loss; total: of the step's shares"""
    columns = dict(sample.columns)
    trainer = columns.get("logprobs", columns.get("old_logprobs"))
    if trainer is not None and "rollout_logprobs" in columns:  # before they are rounded
        columns["difference"] = columns["rollout_logprobs"] - trainer
    return {
        "segment": sample.segment,
        "num_segments": sample.num_segments,
        "reward": sample.reward,
        "group_returns": sample.group_returns,
        "share": asdict(share),
        "total": asdict(total),
        "ids": sample.token_ids.tolist(),
        "texts": [texts.get(token, "") for token in sample.token_ids.tolist()],
        "mask": sample.mask.astype(int).tolist(),
        "versions": sample.versions.tolist(),
        "columns": {
            name: _round(values.tolist(), _RATIO_DIGITS if name == "ratio" else _DIGITS)
            for name, values in columns.items()
        },
    }


def _round(values: Sequence[float], digits: int) -> list[float | None]:
    """With as many significant digits; None if not finite."""
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values]
