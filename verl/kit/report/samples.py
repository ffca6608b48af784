"""The kept samples of embedded rollouts as chunks of the page, one each: tokens and the complete explanation.

A chunk is a JSON object. `explanation` is what `toolrl explain` prints of the sample: `sections` is a list of
[title, [line, ..]] in the order of reading, `failed` a list of the names of checks that fail, which is empty where the
record agrees. It is null without torch, which computes losses. Lines may hold line breaks, and text of models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from verl.kit.report.chunks import Chunks, encoded
from verl.kit.report.folder import RunFolder
from verl.kit.report.loss import Check, computed_loss, share_of, sum_check
from verl.kit.report.rows import number
from verl.kit.report.transcript import rollouts_at
from verl.tracking.samples import KeptSample

_DIGITS = 4
_RATIO_DIGITS = 7  # GSPO clips ratios at 1.0004


def embed_samples(
    run: RunFolder,
    samples: Mapping[int, Sequence[int | None]],
    meta: Mapping[str, list[Any]],
    chunks: Chunks,
    room: int,
) -> tuple[int, list[list[int]]]:
    """Add the samples of embedded rollouts until the room is used up, and their chunks to `meta["tokens"]`.

    samples: step -> lines of its kept samples in the step's transcript. room: size of the chunks that is reached
    Returns their number, and those of rollouts that were generated for an earlier step (`Rollouts.reused`).
    """
    place = {key: row for row, key in enumerate(zip(meta["step"], meta["line"], strict=True))}
    made, explainer = _made(meta), _explainer(run) if samples else None
    logged = {row["step"]: number(row.get("actor/loss")) for row in run.rows}
    added, reused = 0, []
    for step in sorted(samples):
        kept = run.samples(step) if chunks.size < room else None
        if kept is None:
            continue
        computed = computed_loss(kept)
        total = sum_check(kept, computed, logged.get(step))
        rollouts = rollouts_at(run, step, set(samples[step]))
        for rank, sample in enumerate(kept.samples):
            row = place.get((step, sample.line)) if sample.line is not None else _origin(sample, step, made)
            if row is None or chunks.size >= room:
                continue
            origin, line = meta["step"][row], meta["line"][row]
            rollout = rollouts.get(line) if origin == step else rollouts_at(run, origin, {line}).get(line)
            value = {
                **_tokens(sample, kept.texts, share_of(kept, computed, sample.row), total),
                "step": step,
                "number": rank,
                "explanation": explainer and asdict(explainer.explanation(step, kept, computed, rank, rollout)),
            }
            meta["tokens"][row].append(chunks.add(encoded(value)))
            added += 1
            if sample.line is None and sample.segment == 0:
                reused.append([step, origin, line])
    return added, reused


def _explainer(run: RunFolder) -> Any:
    if find_spec("torch") is None:
        return None
    from verl.kit.explain.explanation import Explainer  # imports torch, which a page without samples does not need

    return Explainer.of(run)


_Made = Mapping[tuple[Any, Any], Sequence[tuple[int, float, int]]]


def _made(meta: Mapping[str, list[Any]]) -> _Made:
    """(task, index) -> (step, reward, row of the page) of every embedded rollout."""
    found: dict[tuple[Any, Any], list[tuple[int, float, int]]] = {}
    for row, key in enumerate(zip(meta.get("task_id", ()), meta.get("index", ()), strict=True)):
        found.setdefault(key, []).append((meta["step"][row], meta["reward"][row], row))
    return found


def _origin(sample: KeptSample, step: int, made: _Made) -> int | None:
    """The row of the page of a reused rollout: the newest of an earlier step with its task, index and reward."""
    earlier = [each for each in made.get((sample.task_id, sample.index), ()) if each[0] < step]
    same = [each for each in earlier if math.isclose(each[1] or 0.0, sample.reward, abs_tol=1e-6)]
    return max(same)[2] if same else None


def _tokens(sample: KeptSample, texts: Mapping[int, str], share: Check, total: Check) -> dict[str, Any]:
    """share: of the loss; total: of the step's shares"""
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
            name: _rounded(values.tolist(), _RATIO_DIGITS if name == "ratio" else _DIGITS)
            for name, values in sample.columns.items()
        },
    }


def _rounded(values: Sequence[float], digits: int) -> list[float | None]:
    """With as many significant digits; None if not finite."""
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values]
