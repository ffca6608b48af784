"""Extracts properties of finished rows: family, user texts, values, and phrasings without values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from verl.formats.toolrl_text import listed_tools, parse_gold
from verl.types import Message

Row = Mapping[str, Any]
MASK = "fn_"  # prefix of masked tool names

_USER = re.compile(r"<user> (.*?) </user>")
_RESULTS = re.compile(r"<obs> (.*?) </obs>")
# candidates for values by form: quoted, capitalized and numeric tokens
VALUE = re.compile(r'"[^"]*"|\b[A-Z]\w*\b|\d+(?:[.:]\d+)*')
_NAME = re.compile(r"\b(?:[B-DF-HJ-NP-TV-Z][aeiou][b-df-hj-np-tv-z][aeiou]|[A-Z]\d+)\b")


def system_text(row: Row) -> str:
    """The instruction and the list of tools."""
    return row["prompt"][0]["content"]


def dialogue_text(row: Row) -> str:
    """The user message: the dialogue so far."""
    return row["prompt"][1]["content"]


def gold(row: Row) -> str:
    """The gold response."""
    return row["reward_model"]["ground_truth"]


def requests(row: Row) -> list[str]:
    """The user texts by turn."""
    return _USER.findall(dialogue_text(row))


def tools(row: Row) -> tuple[str, ...]:
    """The names of the listed tools."""
    return listed_tools([Message("system", system_text(row))]) or ()


def values(row: Row) -> set[str]:
    """All values of the gold calls and of the tool results so far, as JSON, without booleans."""
    calls = parse_gold(gold(row)).calls or []
    found = [value for call in calls for value in call["parameters"].values() if not isinstance(value, bool)]
    found += [answer["results"] for text in _RESULTS.findall(dialogue_text(row)) for answer in json.loads(text)]
    return {json.dumps(value) for value in found}


def phrasing(row: Row) -> str:
    """The user texts with a blank for every value."""
    return " / ".join(re.sub(r"\d+(?:[.:]\d+)*|_ _", "_", _NAME.sub("_", text)) for text in requests(row))


def family(row: Row) -> str:
    """The task family of the row."""
    calls = parse_gold(gold(row)).calls
    if calls is None:
        return "irrelevant"
    if len(requests(row)) > 1 or _RESULTS.search(dialogue_text(row)):
        return "dialogue"
    if all(name.startswith(MASK) for name in tools(row)):
        return "masked"
    names = {call["name"] for call in calls}
    if len(calls) == 1:
        return "single"
    return "parallel" if len(names) == 1 else "multiple"


def terms(row: Row) -> Iterator[str]:
    """The terms of the user texts, in lower case and without punctuation."""
    for text in requests(row):
        yield from re.findall(r"[a-z0-9.:]*[a-z0-9]", text.lower())
