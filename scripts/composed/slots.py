"""The kinds of parameters: the text of a value in a request, and in a right and in a careless call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any
from zlib import crc32

from scripts.mini.values import SYLLABLES

_LETTERS = "BCDFGHJKLMNPQRSTVWXZ"
_NAMES_OF_MONTHS = "January February March April May June July August September October November December"
_MONTHS = _NAMES_OF_MONTHS.split()
_DURATIONS = {"ten minutes": 10, "twenty minutes": 20, "half an hour": 30, "one hour": 60, "two hours": 120}
_DURATIONS["three hours"] = 180
_CHOICES = {  # option: other terms for it
    "size": {"small": ("tiny", "little"), "medium": ("normal", "middle"), "large": ("big", "huge")},
    "pace": {"slow": ("calm", "lazy"), "steady": ("even", "usual"), "fast": ("quick", "rapid")},
    "class": {"basic": ("plain", "cheap"), "good": ("fine", "nice"), "best": ("top", "grand")},
}
_FLAGS = {"prepaid": ("prepaid", "unpaid"), "urgent": ("urgently", "calmly"), "private": ("privately", "openly")}


@dataclass(frozen=True, slots=True)
class Value:
    """text: as the user writes it; value: as a call must contain it; careless: as a careless call contains it."""

    text: str
    value: Any
    careless: Any


class Values:
    """Draws the values of one row: no two share a syllable, a letter or a first digit, so that none is confused.

    held_out: from the fifth of the names, codes, counts and dates that training never uses
    """

    def __init__(self, random: Random, held_out: bool) -> None:
        self.random = random
        self._held_out = held_out
        self._used: set[str] = set()

    def fresh(self, draw: Callable[[Random], str], parts: Callable[[str], tuple[str, ...]]) -> str:
        """The next drawn text of this split whose parts are unused in this row."""
        while True:
            text = draw(self.random)
            if (crc32(text.encode()) % 5 == 0) == self._held_out and self._used.isdisjoint(parts(text)):
                self._used.update(parts(text))
                return text


def _name(values: Values) -> Value:
    text = values.fresh(
        lambda random: "".join(random.sample(SYLLABLES, 2)).capitalize(), lambda text: (text[:2].lower(), text[2:])
    )
    return Value(text, text, text.lower())


def _code(values: Values) -> Value:
    text = values.fresh(
        lambda random: f"{random.choice(_LETTERS)}{random.randrange(10)}", lambda text: (text[0], f"code {text[1]}")
    )
    return Value(text, text, int(text[1]))


def _count(values: Values) -> Value:
    text = values.fresh(lambda random: str(random.randrange(10, 100)), lambda text: (f"count {text[0]}",))
    return Value(text, int(text), text)


def _date(values: Values) -> Value:
    text = values.fresh(
        lambda random: f"{random.randrange(1, 29)} {random.choice(_MONTHS)}", lambda text: tuple(text.split())
    )
    day, month = text.split()
    return Value(text, f"{_MONTHS.index(month) + 1:02d}-{int(day):02d}", text)


def _time(values: Values) -> Value:
    hour, half = values.random.randrange(1, 12), values.random.choice(("am", "pm"))
    text = f"{hour} {half}"
    return Value(text, f"{hour + 12 * (half == 'pm'):02d}:00", text)


def _duration(values: Values) -> Value:
    text, minutes = values.random.choice(list(_DURATIONS.items()))
    return Value(text, minutes, text)


def _choice(kind: str) -> Callable[[Values], Value]:
    def draw(values: Values) -> Value:
        option, others = values.random.choice(list(_CHOICES[kind].items()))
        text = values.random.choice(others)
        return Value(text, option, text)

    return draw


def _flag(kind: str) -> Callable[[Values], Value]:
    def draw(values: Values) -> Value:
        value = values.random.random() < 0.5
        return Value(_FLAGS[kind][0 if value else 1], value, str(value).lower())

    return draw


@dataclass(frozen=True, slots=True)
class Slot:
    """One kind of parameter. group: the kind of value that it is counted as; phrases: with the value as {}."""

    group: str
    type: str
    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    phrases: tuple[str, ...]
    draw: Callable[[Values], Value]

    @property
    def label(self) -> str:
        """The word that a question or a reference uses: "Which city?", "my city"."""
        return self.descriptions[0]

    def description(self, random: Random) -> str:
        """What a listed tool states of it; of a choice, the options in random order."""
        if self.group != "choice":
            return random.choice(self.descriptions)
        options = list(_CHOICES[self.label])
        random.shuffle(options)
        return "/".join(options)


SLOTS: Mapping[str, Slot] = {
    "city": Slot("name", "str", ("city", "town", "where"), ("city", "place"), ("in {}", "near {}"), _name),
    "person": Slot("name", "str", ("who", "guest", "person"), ("person", "user"), ("for {}", "with {}"), _name),
    "code": Slot("code", "str", ("code", "number", "id"), ("code",), ("under {}", "as {}"), _code),
    "count": Slot("count", "int", ("times", "n", "amount"), ("count", "quantity"), ("{} times", "{} pieces"), _count),
    "date": Slot("date", "str", ("date", "day", "when"), ("date", "month-day"), ("on {}", "by {}"), _date),
    "time": Slot("time", "str", ("time", "at", "hour"), ("time", "clock"), ("at {}", "from {}"), _time),
    "duration": Slot("duration", "int", ("length", "minutes"), ("duration",), ("lasting {}", "over {}"), _duration),
    **{
        kind: Slot("choice", "str", (kind, f"{kind}_type"), (kind,), (f"of {{}} {kind}",), _choice(kind))
        for kind in _CHOICES
    },
    **{kind: Slot("flag", "bool", (kind, f"is_{kind}"), (kind,), ("{}",), _flag(kind)) for kind in _FLAGS},
}
VARYING = ("city", "person", "code", "date", "time")  # several in one request, and in a reference
