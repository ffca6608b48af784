"""Overlap of a test split with training: n-grams, phrasings, values, answers and whole prompts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

from scripts.mini.reading import MASK, Row, dialogue_text, gold, phrasing, system_text, terms, tools, values


@dataclass(frozen=True, slots=True)
class Overlap:
    """Counts of items of a test split that occur in training."""

    ngrams: dict[int, float]  # n -> share of the n-grams of the user texts, in [0, 1]
    prompts: int  # test rows with a prompt seen in training; likewise answers (without thoughts) and phrasings
    answers: int
    phrasings: int
    values: int  # distinct values in both; likewise tools, without masked ones
    tools: int


def _ngrams(row: Row, n: int) -> Iterator[tuple[str, ...]]:
    found = list(terms(row))
    return zip(*(found[start:] for start in range(n)), strict=False)


def measure(seen: Sequence[Row], test: Sequence[Row], sizes: Sequence[int] = (3, 5, 8)) -> Overlap:
    """Compare the rows of a test split with all training rows."""
    shares = {}
    for n in sizes:
        known = {ngram for row in seen for ngram in _ngrams(row, n)}
        tested = [ngram for row in test for ngram in _ngrams(row, n)]
        shares[n] = sum(ngram in known for ngram in tested) / max(len(tested), 1)

    return Overlap(
        ngrams=shares,
        prompts=_repeated_rows(seen, test, lambda row: (system_text(row), dialogue_text(row))),
        answers=_repeated_rows(seen, test, lambda row: gold(row).partition("</think>")[2]),
        phrasings=_repeated_rows(seen, test, phrasing),
        values=_shared(seen, test, values),
        tools=_shared(seen, test, lambda row: {name for name in tools(row) if not name.startswith(MASK)}),
    )


def _repeated_rows(seen: Sequence[Row], test: Sequence[Row], key: Callable[[Row], Hashable]) -> int:
    """The number of test rows whose key occurs in training."""
    known = set(map(key, seen))
    return sum(key(row) in known for row in test)


def _shared(seen: Sequence[Row], test: Sequence[Row], items: Callable[[Row], set[str]]) -> int:
    """The number of distinct items that occur in both."""
    return len({item for row in seen for item in items(row)} & {item for row in test for item in items(row)})
