"""The rubric of a judge: a TOML file of criteria, each scored with a number from 0 to `scale`.

scale = 4
gold = true    # whether the judge sees the row's gold answer
[criteria]
right = "The response gives the gold answer, in any form."
brief = {text = "It has at most two sentences.", weight = 0.5}
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.errors import ConfigError
from verl.json_values import read_json
from verl.registry import nearest

CHECK = "check"  # a key of every verdict
_KEYS = ("scale", "gold", "criteria")
_CRITERION_KEYS = ("text", "weight")
_MAX_SCALE = 100
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_FENCE = re.compile(r"```(?:json)?\s*(\{.*\})\s*```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Criterion:
    """One property of a response. text: what earns the highest number"""

    name: str
    text: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Rubric:
    """scale: the highest number of a criterion; gold: whether the judge sees the gold answer"""

    criteria: tuple[Criterion, ...]
    scale: int = 1
    gold: bool = True

    def total(self, verdict: Mapping[str, float]) -> float:
        """The weighted mean of the criteria's numbers / scale, from 0 to 1."""
        weighted = math.fsum(each.weight * verdict[each.name] for each in self.criteria)
        return weighted / (self.scale * math.fsum(each.weight for each in self.criteria))

    def verdict(self, text: str, check: str) -> dict[str, float]:
        """{criterion: number} of a judge's text: a JSON object of all criteria and the check, alone or in a fence.

        Raises ValueError for anything else, and for a number that is not from 0 to scale.
        """
        fenced = _FENCE.fullmatch(text.strip())
        try:
            found = read_json(fenced[1] if fenced else text)
        except RecursionError as error:
            raise ValueError("is nested too deeply") from error
        names = [each.name for each in self.criteria]
        if not isinstance(found, dict) or found.keys() != {*names, CHECK}:
            raise ValueError(f"is no JSON object with the keys {', '.join((*names, CHECK))}")
        if found[CHECK] != check:
            raise ValueError(f"has another {CHECK} than the one that was asked for")
        for name in names:
            value = found[name]
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= self.scale:
                raise ValueError(f"has {value!r} for {name}, no number from 0 to {self.scale}")
        return {name: float(found[name]) for name in names}


def read_rubric(path: str) -> Rubric:
    """Raises ConfigError, naming the file and the key, for a file that is no rubric."""
    try:
        found = tomllib.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:  # TOML's errors and those of UTF-8 are ValueErrors
        raise ConfigError(f"the rubric {path!r} cannot be read: {error}") from error
    for key in found:
        if key not in _KEYS:
            raise _error(path, f"there is no key {key!r}; {nearest(key, list(_KEYS))}")
    scale, gold, criteria = found.get("scale", 1), found.get("gold", True), found.get("criteria")
    if type(scale) is not int or not 1 <= scale <= _MAX_SCALE:
        raise _error(path, f"scale must be a whole number from 1 to {_MAX_SCALE}, got {scale!r}")
    if type(gold) is not bool:
        raise _error(path, f"gold must be true or false, got {gold!r}")
    if not isinstance(criteria, dict) or not criteria:
        raise _error(path, '[criteria] must have at least one line, such as right = "It gives the gold answer."')
    return Rubric(tuple(_criterion(path, *each) for each in criteria.items()), scale, gold)


def _criterion(path: str, name: str, given: Any) -> Criterion:
    if not _NAME.fullmatch(name) or name == CHECK:
        raise _error(path, f"criterion {name!r} must be named by small letters, digits and _, and not {CHECK!r}")
    entry = {"text": given} if isinstance(given, str) else given
    if not isinstance(entry, dict) or not entry.keys() <= set(_CRITERION_KEYS):
        raise _error(path, f"criterion {name!r} must be a text or {{text = .., weight = ..}}, got {given!r}")
    text, weight = entry.get("text"), entry.get("weight", 1.0)
    if not isinstance(text, str) or not text.strip():
        raise _error(path, f"criterion {name!r} has no text, which states what earns the highest number")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise _error(path, f"the weight of criterion {name!r} must be a positive number, got {weight!r}")
    return Criterion(name, text.strip(), float(weight))


def _error(path: str, problem: str) -> ConfigError:
    return ConfigError(f"the rubric {path!r}: {problem}")
