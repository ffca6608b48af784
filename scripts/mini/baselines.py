"""Trivial baseline policies, and their mean default reward."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any

from scripts.mini.phrases import NO_TOOL
from scripts.mini.reading import VALUE, Row, gold, requests, system_text
from scripts.raw.rlla import CALL_THOUGHT, RESPONSE_THOUGHT
from verl.formats.toolrl_text import render_response
from verl.utils.reward_score.rlla import RllaOptions, score_response

_FIRST_TOOL = re.compile(r"^1\. Name: (.*)\nDescription: .*\nParameters: (.*)$", re.MULTILINE)


def copy_first_tool(row: Row) -> str:
    """Call the first listed tool with the capitalized, quoted and numeric tokens of the last request, in order."""
    name, parameters = _FIRST_TOOL.search(system_text(row)).groups()
    found = [_typed(text) for text in VALUE.findall(requests(row)[-1])]
    call = {"name": name, "parameters": dict(zip(json.loads(parameters), found, strict=False))}
    return render_response(CALL_THOUGHT, [call])


def copy_first_tool_by_type(row: Row) -> str:
    """The same, but each parameter takes the first remaining value of its declared type."""
    name, parameters = _FIRST_TOOL.search(system_text(row)).groups()
    left = [_typed(text) for text in VALUE.findall(requests(row)[-1])]
    chosen = {}
    for parameter, about in json.loads(parameters).items():
        fitting = [value for value in left if type(value).__name__ == about["type"]]
        if fitting:
            chosen[parameter] = fitting[0]
            left.remove(fitting[0])
    return render_response(CALL_THOUGHT, [{"name": name, "parameters": chosen}])


def _typed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def always_respond(row: Row) -> str:
    """Always respond that no tool fits."""
    return render_response(RESPONSE_THOUGHT, response=NO_TOOL)


BASELINES: dict[str, Callable[[Row], str]] = {
    "gold": gold,
    "copy the first tool": copy_first_tool,
    "copy it by type": copy_first_tool_by_type,
    "always respond": always_respond,
}


def mean_reward(rows: Sequence[Row], response: Callable[[Row], str]) -> float:
    """Mean total reward of the policy `response` with default options."""
    return mean(score_response(response(row), gold(row), 0, RllaOptions()).score for row in rows)
