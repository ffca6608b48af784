"""Pools of values that users name and tools receive, split once into training and held-out values.

Every value is put together from pieces that occur in both parts, one token each, so that a small model can copy a
value it has never seen: a name is two syllables of one vowel (Kala, Miri), a code a letter and a digit; the digits of
a number rise (27, 4.8, 350). So a model that mixes up the pieces of two values mostly says what cannot be a value.
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
FLAGS = {"on_off": ("on", "off"), "open_close": ("open", "close")}  # the words for true and for false
JSON_TYPES = {"int": "int", "sum": "int", "float": "float", "on_off": "bool", "open_close": "bool"}  # others: str


@dataclass(frozen=True, slots=True)
class Values:
    """One part of every pool."""

    pools: dict[str, list[Any]]

    def draw(self, kind: str, random: Random) -> Any:
        """A value of this kind; a title is a name that the user puts in quotes."""
        if kind in FLAGS:
            return random.random() < 0.5
        return random.choice(self.pools["name" if kind == "title" else kind])


def split_values(seed: int) -> tuple[Values, Values]:
    """The training part and the held-out part of every pool, disjoint."""
    training, held_out = {}, {}
    for kind, pool in POOLS.items():
        shuffled = Random(f"{seed}/values/{kind}").sample(pool, len(pool))
        cut = int(len(pool) * _HELD_OUT_SHARE)
        held_out[kind], training[kind] = shuffled[:cut], shuffled[cut:]
    return Values(training), Values(held_out)


def spoken(kind: str, value: Any) -> str:
    """The value as the user says it."""
    if kind in FLAGS:
        return FLAGS[kind][0 if value else 1]
    return f'"{value}"' if kind == "title" else str(value)
