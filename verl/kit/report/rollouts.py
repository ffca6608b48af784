"""Rollouts as chunks of the page, within the room that it has for them.

Of every step the first rollouts of its transcript are read, and those whose tokens are kept. They are embedded step by
step, in an order that spreads any part evenly over the run, until the room is used up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.kit.report.chunks import Chunks, encoded, spread_order
from verl.kit.report.folder import RunFolder
from verl.kit.report.reasons import Reasons, reasons_of
from verl.kit.report.rows import number
from verl.kit.report.samples import embed_samples
from verl.kit.report.transcript import rollout_of
from verl.text import counted

MAX_READ = 100_000  # rollouts of a run, for distributions
MAX_ROLLOUTS = 20_000  # of a page
_CHUNK = 32  # rollouts
_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
_DETAILS = ("prompt", "tools", "responses", "segments", "answer", "exceeded", "turn_rewards", "tool_uses")
_META = ("task_id", "data_source", "index", "reward", "stop_reason", "num_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """meta: column -> value by rollout; quantiles: name -> one row of `_QUANTILES` per step"""

    meta: dict[str, list[Any]] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    quantiles: dict[str, list[list[float]]] = field(default_factory=dict)
    read: int = 0
    shown: int = 0
    shown_steps: int = 0
    samples: int = 0
    reused: list[list[int]] = field(default_factory=list)  # step that trains a rollout again, its own step, its line
    left_out: list[str] = field(default_factory=list)  # rules that left something out, for the page


def read_rollouts(run: RunFolder, chunks: Chunks, max_chars: int) -> Rollouts:
    """max_chars: room for the run's chunks; two thirds for rollouts, the rest for tokens"""
    steps = run.transcript_steps()
    per_step = max(1, MAX_READ // max(1, len(steps)))
    quantiles: dict[str, list[list[float]]] = {"reward": [], "num_tokens": [], "turns": []}
    result = Rollouts(meta={"step": [], "line": [], "chunk": [], "place": [], "tokens": []}, steps=steps)
    start, read, cut, shown_steps = chunks.size, 0, False, 0
    kept, reasons = set(run.kept_steps()), reasons_of(run)
    found: dict[int, dict[int, dict[str, Any]]] = {}
    samples: dict[int, list[int | None]] = {}  # step -> their lines in its transcript
    for step in (steps[place] for place in spread_order(len(steps))):
        if step in kept and (opened := run.samples(step)) is not None:
            samples[step] = [each.line for each in opened.samples]
        rows, more = _rows(run, step, per_step, set(samples.get(step, ())))
        found[step], cut = {line: _summary(row) for line, row in rows.items()}, cut or more
        read += len(rows)
        if rows and chunks.size - start < max_chars * 2 // 3 and len(result.meta["step"]) < MAX_ROLLOUTS:
            _embed(step, rows, result.meta, chunks, reasons)
            shown_steps += 1
    for step in steps:
        for name in quantiles:
            quantiles[name].append(_quantiles([each[name] for each in found[step].values()]))
    num_samples, reused = embed_samples(run, samples, result.meta, chunks, start + max_chars)
    rules = []
    if cut:
        rules.append(f"of every step the first {per_step} rollouts are read, and those whose tokens are kept")
    if shown_steps < len(steps):
        rules.append(f"{shown_steps} of {len(steps)} steps, spread over the run, fit into the file with their rollouts")
    kept_samples = sum(map(len, samples.values()))
    if num_samples < kept_samples:
        rules.append(f"{num_samples} of {kept_samples} kept samples fit into it with their tokens")
    return Rollouts(
        meta=result.meta,
        steps=steps,
        quantiles=quantiles,
        read=read,
        shown=len(result.meta["step"]),
        shown_steps=shown_steps,
        samples=num_samples,
        reused=reused,
        left_out=rules,
    )


def _rows(run: RunFolder, step: int, limit: int, kept: set[int | None]) -> tuple[dict[int, dict[str, Any]], bool]:
    """({line: rollout}, whether there are more)"""
    rows: dict[int, dict[str, Any]] = {}
    damaged, more = 0, False
    for line, text in enumerate(run.transcript(step)):
        if line >= limit and line not in kept:
            more = True
        elif (row := rollout_of(text)) is not None:
            rows[line] = row
        else:
            damaged += 1
    if damaged:
        run.notes.append(
            f"transcripts of step {step}: {counted(damaged, 'line')} left out (damaged, or with values of other types)"
        )
    return rows, more


def _summary(row: Mapping[str, Any]) -> dict[str, float]:
    turns = sum(message.get("role") == "assistant" for message in row["responses"])
    return {"reward": number(row.get("reward")) or 0.0, "num_tokens": row.get("num_tokens") or 0, "turns": turns}


def _quantiles(values: list[float]) -> list[float]:
    if not values:
        return []
    ordered = sorted(values)
    return [ordered[round(share * (len(ordered) - 1))] for share in _QUANTILES]


def _embed(
    step: int,
    rows: Mapping[int, Mapping[str, Any]],
    meta: dict[str, list[Any]],
    chunks: Chunks,
    reasons: Reasons | None,
) -> None:
    equal = _groups_without_spread(rows.values())
    lines = list(rows)
    for first in range(0, len(lines), _CHUNK):
        part = lines[first : first + _CHUNK]
        details = [{name: rows[line][name] for name in _DETAILS if rows[line].get(name)} for line in part]
        why = [reasons.of(rows[line]) if reasons else [] for line in part]
        scores = [{"score": rows[line].get("score"), "reasons": its} for line, its in zip(part, why, strict=True)]
        chunk = chunks.add(encoded([{**one, **two} for one, two in zip(details, scores, strict=True)]))
        for place, line in enumerate(part):
            row = rows[line]
            added: dict[str, Any] = {
                **{name: row.get(name) for name in _META},
                "step": step,
                "line": line,
                "chunk": chunk,
                "place": place,
                "tokens": [],
                "turns": _summary(row)["turns"],
                "tool_status": "".join(sorted({_letter(use) for use in row.get("tool_uses") or ()})),
                "equal": row.get("task_id") in equal,
            }
            for name, value in added.items():
                meta.setdefault(name, []).append(value)


def _letter(use: Mapping[str, Any]) -> str:
    """s, u, t, n: success, user_error, timeout, unavailable"""
    status = str(use.get("status"))
    return "n" if status == "unavailable" else status[:1]


def _groups_without_spread(rows: Iterable[Mapping[str, Any]]) -> set[Any]:
    """Tasks whose rollouts have equal rewards."""
    rewards: dict[Any, set[Any]] = {}
    sizes: Counter[Any] = Counter()
    for row in rows:
        rewards.setdefault(row.get("task_id"), set()).add(row.get("reward"))
        sizes[row.get("task_id")] += 1
    return {task for task, values in rewards.items() if len(values) == 1 and sizes[task] > 1}
