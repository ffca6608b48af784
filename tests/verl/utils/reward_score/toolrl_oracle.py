"""ToolRL's reward written a second time, as plainly as its description allows: regular expressions, lists and counters.

Slow, and quadratic on hostile text; the tests compare the real implementation with it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any


def oracle_score(response: str, answer: str, step: int, on: set[str]) -> tuple[float, float, float, float]:
    """(score, format, correctness, length) of a stripped response under the toggles that are on."""
    form = _format(response, answer, step, on)
    correctness = _correctness(response, answer, step, on)
    length = _length(response, step, on) if on & {"WITHLENGTH", "SCHEDULELENGTH"} else 0.0
    return form + correctness + length, form, correctness, length


def _format(response: str, answer: str, step: int, on: set[str]) -> float:
    low, high = 0.0, 1.0
    if "MAX1STEP30MAX3" in on and step >= 30:
        high = 0.5
    if "SCHEDULEREWARD" in on:
        high, low = max(2 - (2 - high) * step / 150, 1.0), min(-2 + 2 * step / 150, -1.0)
    call, answered = "<tool_call>" in answer, "<response>" in answer
    pattern = r"<think>.*?</think>"
    pattern += r"\n<tool_call>\n.*?\n</tool_call>" if call else ""
    pattern += r"\n<response>.*?</response>" if answered else ""
    tags = ["<tool_call>", "</tool_call>"] * call + ["<response>", "</response>"] * answered
    fits = re.fullmatch(pattern, response, re.DOTALL) and all(response.count(tag) == 1 for tag in tags)
    return high if fits else low


def _length(response: str, step: int, on: set[str]) -> float:
    if "<think>" not in response or "</think>" not in response:
        return 0.0
    full = 384 + 256 * step / 105 if "SCHEDULELENGTH" in on else 512
    terms = response.split("<think>")[-1].split("</think>")[0].split()
    return min(round(len(terms) / full, 2), 1.0)


def _correctness(response: str, answer: str, step: int, on: set[str]) -> float:
    if "<tool_call>" not in answer:
        return 0.0
    top = 1.0 if "CORRECTMAX1" in on else 3.0
    if "MAX1STEP30MAX3" in on and step < 30:
        top /= 3
    if "SCHEDULEREWARD" in on:
        top = min((top - 2) * step / 150 + 2, 3.0)
    gold = _block(answer)
    if "<tool_call>" not in response or "</tool_call>" not in response:
        return -top
    try:
        return 2 * top * _agreement(gold, _block(response), on) - top
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return -top


def _block(text: str) -> list[Any]:
    return [json.loads(line) for line in text.split("<tool_call>")[1].split("</tool_call>")[0].strip().split("\n")]


def _overlap(gold: list[Any], found: list[Any], on: set[str]) -> float:
    if gold == found:
        return 1.0
    if "REFINEDREWARD" in on or not gold or not found:
        return 0.0
    shared = (Counter(gold) & Counter(found)).total()
    return shared / (len(gold) + len(found) - shared)


def _agreement(gold: list[Any], found: list[Any], on: set[str]) -> float:
    if gold == found:
        return 1.0
    if "COARSEREWARD" in on:
        return 0.0
    points = _overlap([call["name"] for call in gold], [call["name"] for call in found], on)
    most = 1.0
    free = list(range(len(found)))
    for call in gold:
        wanted = call["parameters"]
        most += 1 if "INTERMEDIATEREWARD" in on else 1 + len(wanted)
        earned: list[tuple[float, int]] = []
        for index in free:
            if found[index]["name"] != call["name"]:
                continue
            if "INTERMEDIATEREWARD" in on:
                earned.append((float(found[index] == call), -index))
                continue
            given = found[index]["parameters"]
            names = _overlap(list(wanted.keys()), list(given.keys()), on)
            earned.append((names + sum(key in given and given[key] == value for key, value in wanted.items()), -index))
        if earned and max(earned)[0] > 0:
            best, index = max(earned)
            points += best
            free.remove(-index)
    return points / most
