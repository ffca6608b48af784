"""Rollouts as chunks of the page, within the room that it has for them.

Of every step the first rollouts of its transcript are read, and those whose tokens are kept. They are embedded step by
step, in an order that spreads any part evenly over the run, until the room is used up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolrl.analysis.report.chunks import Chunks, encoded, spread_order, spread_part
from toolrl.analysis.report.folder import RunFolder
from toolrl.analysis.report.reasons import Reasons, reasons_of
from toolrl.analysis.report.rows import number
from toolrl.analysis.report.samples import embed_samples
from toolrl.analysis.report.transcript import rollout_of
from toolrl.analysis.samples.sample_files import MAX_BYTES
from verl.text import counted

MAX_STEPS = 5_000  # per page
MAX_READ = 100_000  # rollouts of a run, for distributions
MAX_ROLLOUTS = 20_000  # per run and page
_CHUNK = 32  # rollouts
_REFUSED = 32  # rollouts that do not fit; after them no other of the step is tried
_MOST_REFUSED = 8 * _REFUSED  # after them no other of the run
_FULL = 100  # where less than this part of the room is left, nothing more is tried
_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
_DETAILS = ("prompt", "tools", "responses", "segments", "answer", "exceeded", "turn_rewards", "tool_uses")
_META = ("task_id", "data_source", "index", "reward", "stop_reason", "num_tokens")
_COLUMNS = (*_META, "step", "line", "group", "chunk", "place", "tokens", "turns", "tool_status", "equal")
_SUMMARY = ("reward", "num_tokens", "turns")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """meta: column -> value by rollout; quantiles: name -> one row of `_QUANTILES` per step

    read: rollouts that the quantiles are of: the first of every step
    """

    meta: dict[str, list[Any]] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    quantiles: dict[str, list[list[float]]] = field(default_factory=dict)
    read: int = 0
    shown: int = 0
    shown_steps: int = 0
    samples: int = 0
    reused: list[list[int]] = field(default_factory=list)  # step that trains a rollout again, its own step, its line
    left_out: list[str] = field(default_factory=list)  # rules that left something out, for the page


def read_rollouts(run: RunFolder, chunks: Chunks, room: int) -> Rollouts:
    """room: characters that the run may add to the page; two thirds for rollouts, the rest for tokens"""
    every = run.transcript_steps()
    steps = spread_part(every, MAX_STEPS)
    per_step = max(1, MAX_READ // max(1, len(steps)))
    limit, kept = chunks.size + room, set(run.kept_steps())
    embedding = _Embedding(chunks, reasons_of(run), room * 2 // 3)
    read: dict[int, _StepRows] = {}
    dropped = 0
    for step in (steps[place] for place in spread_order(len(steps))):
        lines, without_room = run.sample_lines(step) if step in kept else ([], 0)
        dropped += without_room
        read[step] = _StepRows(run, step, per_step, lines)
        embedding.add_step(read[step], last=len(read) == len(steps))
    run.notes.extend(_damaged_lines(step, read[step].damaged) for step in steps if read[step].damaged)
    quantiles = {name: [_quantiles(read[step].summary[name]) for step in steps] for name in _SUMMARY}
    chunks.size += len(encoded([steps, quantiles]))
    samples = {step: rows.kept for step, rows in read.items() if rows.kept}
    num_samples, reused = embed_samples(run, samples, embedding.meta, chunks, limit)
    shown, shown_steps = len(embedding.meta["step"]), len(set(embedding.meta["step"]))
    rules = []
    if len(steps) < len(every):
        rules.append(f"of {len(every)} steps {len(steps)} are read, spread over the run")
    if any(rows.more for rows in read.values()):
        rules.append(f"of every step the first {counted(per_step, 'rollout')} are read, and those with tokens")
    if shown < (total := sum(rows.found for rows in read.values())):
        which = f"of {shown_steps} of {counted(len(steps), 'step')} spread over the run"
        rules.append(f"{shown} of {counted(total, 'rollout')} fit into the file, {which}")
    if num_samples < (kept_samples := sum(map(len, samples.values()))):
        rules.append(f"{num_samples} of {counted(kept_samples, 'kept sample')} fit into it with their tokens")
    if dropped:
        every_sample = counted(dropped + kept_samples, "chosen sample")
        rules.append(
            f"{dropped} of {every_sample} had no room in the files of their steps ({MAX_BYTES / 1e6:g} MB each)"
        )
    return Rollouts(
        meta=embedding.meta,
        steps=steps,
        quantiles=quantiles,
        read=sum(rows.read for rows in read.values()),
        shown=shown,
        shown_steps=shown_steps,
        samples=num_samples,
        reused=reused,
        left_out=rules,
    )


def _damaged_lines(step: int, count: int) -> str:
    return f"transcripts of step {step}: {counted(count, 'line')} left out (damaged, or with values of other types)"


class _StepRows:
    """The rollouts of a step, by line: the first `limit`, and those of kept samples. Iterated once.

    kept: lines of the samples, None for those of other steps
    found: rollouts of these; read: those of the first lines, which the summary is of, as the kept ones are a choice
    damaged: lines that cannot be shown; more: whether the transcript has others
    equal: groups that are read completely, and have equal returns
    """

    def __init__(self, run: RunFolder, step: int, limit: int, kept: Sequence[int | None]) -> None:
        self.step, self.kept = step, kept
        self.kept_lines = {line for line in kept if line is not None}
        self.found = self.read = self.damaged = 0
        self.more = False
        self.summary: dict[str, list[float]] = {name: [] for name in _SUMMARY}
        self.equal: set[Any] = set()
        self._run, self._limit = run, limit

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        last = max(self.kept_lines, default=-1)
        returns: dict[Any, list[float]] = {}
        partial = set()
        for line, text in enumerate(self._run.transcript(self.step)):
            if line >= self._limit and line not in self.kept_lines:
                if not self.more and (next_row := rollout_of(text)) is not None:
                    partial.add(_group(next_row))
                self.more = True
                if line > last:
                    break
            elif (row := rollout_of(text)) is None:
                self.damaged += 1
            else:
                self.found += 1
                if line < self._limit:
                    self._summarize(row)
                    returns.setdefault(_group(row), []).append(_return(row))
                else:
                    partial.add(_group(row))
                yield line, row
        complete = {group: values for group, values in returns.items() if group not in partial}
        self.equal = {group for group, values in complete.items() if len(values) > 1 and len(set(values)) == 1}

    def _summarize(self, row: Mapping[str, Any]) -> None:
        self.read += 1
        values = {"reward": row.get("reward"), "num_tokens": row.get("num_tokens"), "turns": _turns(row)}
        for name, value in values.items():
            if value is not None:
                self.summary[name].append(value)


def _group(row: Mapping[str, Any]) -> Any:
    """Group number in the step. Earlier versions did not number groups; they have one per task."""
    return row.get("group", row["task_id"])


def _turns(row: Mapping[str, Any]) -> int:
    return sum(message["role"] == "assistant" for message in row["responses"])


def _return(row: Mapping[str, Any]) -> float:
    """The reward and those of the turns."""
    values = map(number, (row.get("reward"), *row.get("turn_rewards", ())))
    return sum(value for value in values if value is not None)


def _quantiles(values: list[float]) -> list[float]:
    if not values:
        return []
    ordered = sorted(values)
    return [ordered[round(share * (len(ordered) - 1))] for share in _QUANTILES]


_Prepared = tuple[dict[str, Any], dict[str, Any]]  # what a chunk has of a rollout, what `meta` has


class _Embedding:
    """The rollouts of a run in the page, and their metadata. room: characters for them

    A step uses at most half of what is left, so that a large one leaves room for others, and the rollouts with tokens
    all of that, the others nine tenths.
    """

    def __init__(self, chunks: Chunks, reasons: Reasons | None, room: int) -> None:
        self.meta: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
        self._chunks, self._reasons = chunks, reasons
        self._limit, self._least = chunks.size + room, room // _FULL
        self._limits = {False: 0, True: 0}  # per step, by whether a rollout is kept
        self._refused = {False: 0, True: 0}  # per step
        self._all_refused = 0

    def add_step(self, rows: _StepRows, last: bool) -> None:
        """Embed what fits of a step."""
        first, parts = len(self.meta["step"]), 1 if last else 2
        free = max(0, self._limit - self._chunks.size) // parts
        self._refused = dict.fromkeys(self._refused, 0 if free * parts >= self._least else _REFUSED)
        self._limits = {False: self._chunks.size + free * 9 // 10, True: self._chunks.size + free}
        most = min(MAX_ROLLOUTS - first, max(_CHUNK, (MAX_ROLLOUTS - first) // parts))
        left = {False: most - len(rows.kept_lines), True: most}
        batches: dict[bool, list[_Prepared]] = {False: [], True: []}
        for line, row in rows:
            kept = line in rows.kept_lines
            if left[kept] > 0 and self._is_open(kept):
                left[kept] -= 1
                left[True] -= not kept
                batches[kept].append(self._prepare(rows.step, line, row))
                if len(batches[kept]) == _CHUNK:
                    self._add(batches[kept], kept)
                    batches[kept] = []
        for kept, batch in batches.items():
            self._add(batch, kept)
        for place in range(first, len(self.meta["step"])):
            self.meta["equal"][place] = self.meta["group"][place] in rows.equal

    def _add(self, batch: Sequence[_Prepared], kept: bool) -> None:
        """Embed rollouts as one chunk; if they do not fit, their halves, down to a rollout that is left out."""
        if not batch or not self._is_open(kept):
            return
        for place, (_, row) in enumerate(batch):
            row |= {"chunk": len(self._chunks.texts), "place": place}
        columns = {name: [row[name] for _, row in batch] for name in _COLUMNS}
        details = encoded([each for each, _ in batch])
        if self._chunks.add(details, self._limits[kept], len(encoded(columns))) is not None:
            for name, values in columns.items():
                self.meta[name] += values
        elif len(batch) == 1:
            self._refused[kept] += 1
            self._all_refused += 1
        else:
            half = len(batch) // 2
            self._add(batch[:half], kept)
            self._add(batch[half:], kept)

    def _is_open(self, kept: bool) -> bool:
        return self._refused[kept] < _REFUSED and self._all_refused < _MOST_REFUSED

    def _prepare(self, step: int, line: int, row: Mapping[str, Any]) -> _Prepared:
        details = {name: row[name] for name in _DETAILS if row.get(name)}
        why = self._reasons.of(row) if self._reasons else []
        status = "".join(sorted({_letter(use) for use in row.get("tool_uses") or ()}))
        own = {
            "step": step,
            "line": line,
            "group": _group(row),
            "tokens": [],
            "turns": _turns(row),
            "tool_status": status,
            "equal": False,
        }
        return {**details, "score": row.get("score"), "reasons": why}, {**{n: row.get(n) for n in _META}, **own}


def _letter(use: Mapping[str, Any]) -> str:
    """s, u, t, n: success, user_error, timeout, unavailable"""
    status = str(use.get("status"))
    return "n" if status == "unavailable" else status[:1]
