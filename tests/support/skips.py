"""The skips of a run, summed up by what would enable them: a reason reads `what is missing; what to do`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

_MAX_LINES = 15  # with the heading


def summary(reasons: Iterable[str]) -> list[str]:
    """A heading, and a line for each thing to do with its number of tests, the most frequent first."""
    counts: Counter[str] = Counter()
    first: dict[str, str] = {}
    for reason in reasons:
        what, _, hint = reason.removeprefix("Skipped: ").rpartition("; ")
        counts[hint] += 1
        if first.setdefault(hint, what) != what:
            first[hint] = f"{first[hint].removesuffix(' ..')} .."
    if not counts:
        return []
    lines = [f"{count:5}  {f'{first[hint]}; ' if first[hint] else ''}{hint}" for hint, count in counts.most_common()]
    shown = lines if len(lines) < _MAX_LINES else lines[: _MAX_LINES - 2]
    rest = sum(counts.values()) - sum(count for _, count in counts.most_common(len(shown)))
    more = [f"{rest:5}  for {len(lines) - len(shown)} other reasons; pytest -rs lists them all"] if rest else []
    return [f"skipped: {sum(counts.values())}", *shown, *more]
