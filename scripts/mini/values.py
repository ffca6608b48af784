"""Pools of values for requests and calls, split into training and held-out values.

Every value is composed of pieces that occur in both parts, one token each, so that a small model can copy an unseen
value: a name is two syllables with one vowel (Kala, Miri), a code a letter and a digit; the digits of a number are
ascending (27, 4.8, 350). So a model that mixes pieces of two values mostly produces an invalid one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from random import Random
from typing import Any

_HELD_OUT_SHARE = 0.2
SYLLABLES = [consonant + vowel for consonant in "bdfklmnrst" for vowel in "aeiou"]
_NAMES = [
    f"{first}{second}".capitalize()
    for first in SYLLABLES
    for second in SYLLABLES
    if first != second and first[1] == second[1]
]
_RISING = list(combinations(range(1, 10), 2))

POOLS: dict[str, list[Any]] = {
    "name": _NAMES,
    "code": [f"{letter}{digit}" for letter in "BCDFGHJKLMNPQRSTVWXZ" for digit in range(10)],
    "time": [f"{hour}:{minute:02d}" for hour in range(1, 10) for minute in (0, 15, 30, 45)],
    "int": [10 * first + second for first, second in _RISING],
    "sum": [100 * first + 10 * second for first, second in _RISING],
    "float": [(10 * first + second) / 10 for first, second in _RISING],
}
FLAGS = {"on_off": ("on", "off"), "open_close": ("open", "close")}  # texts for true and for false
JSON_TYPES = {"int": "int", "sum": "int", "float": "float", "on_off": "bool", "open_close": "bool"}  # others: str


@dataclass(frozen=True, slots=True)
class Values:
    """The training or held-out part of every pool."""

    pools: dict[str, list[Any]]

    def draw(self, kind: str, random: Random) -> Any:
        """A value of this kind; a title is a quoted name."""
        if kind in FLAGS:
            return random.random() < 0.5
        return random.choice(self.pools["name" if kind == "title" else kind])


def split_values(seed: int) -> tuple[Values, Values]:
    """The disjoint training and held-out parts of every pool."""
    training, held_out = {}, {}
    for kind, pool in POOLS.items():
        shuffled = Random(f"{seed}/values/{kind}").sample(pool, len(pool))
        cut = int(len(pool) * _HELD_OUT_SHARE)
        held_out[kind], training[kind] = shuffled[:cut], shuffled[cut:]
    return Values(training), Values(held_out)


def spoken(kind: str, value: Any) -> str:
    """The value as written by the user."""
    if kind in FLAGS:
        return FLAGS[kind][0 if value else 1]
    return f'"{value}"' if kind == "title" else str(value)
