"""Pools of values that users name and tools receive, split once into training and held-out values.

Every value is put together from pieces that occur in both parts, one token each, so that a small model can copy a
value it has never seen: a name is two syllables, a code a letter and a digit, a number two digits or so.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

_HELD_OUT_SHARE = 0.2
SYLLABLES = [consonant + vowel for consonant in "bdfklmnrst" for vowel in "aeio"]
_NAMES = [f"{first}{second}".capitalize() for first in SYLLABLES for second in SYLLABLES if first != second]

POOLS: dict[str, list[Any]] = {
    "name": _NAMES,
    "code": [f"{letter}{digit}" for letter in "BCDFGHJKLMNPQRSTVWXZ" for digit in range(10)],
    "time": [f"{hour}:{minute:02d}" for hour in range(10, 20) for minute in (0, 15, 30, 45)],
    "int": list(range(10, 100)),
    "sum": list(range(110, 1000, 10)),
    "float": [tenths / 10 for tenths in range(11, 100) if tenths % 10],
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
