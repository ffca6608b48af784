"""Rewards beside the published functions: totals that those gave for the same responses, over whole grids of responses.

parity/*.json hold what NVlabs' (Tool-N1 at f9b4849) and Search-R1's (at a14dc3a) reward functions returned for the
cases below, in their order: for each a digit, the place of the total among `values`; null where it raised.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random

import pytest

from tests.toolrl.papers.test_recipe_rewards import episode, task, total
from verl.types import Message, Trajectory

PARITY = Path(__file__).with_name("parity")
F, G = '{"name": "f", "arguments": {"a": 1, "b": {"c": [2], "d": null}}}', '{"name": "g", "arguments": {}}'
GOLDS = [f"[{F}, {G}]", "[]", json.dumps(f"[{G}]")]  # published code never finds a gold answer of one bare object
BLOCKS = [
    f"[{F}, {G}]",
    f"[{G}, {F}]",
    f"[{G}]",
    G,
    "[]",
    "{}",
    "null",
    "7",
    "true",
    "",
    " \u00a0[]\u00a0 ",
    "no JSON",
    f"[{F}, {F}]",
    f"[{F}, {G}".replace("1", "2") + "]",
    f"[{F}, {G}".replace("1", "1.0") + "]",
    f"[{F}, {G}".replace("1", '"1"') + "]",
    f"[{F}, {G}, {G}]",
    '[{"name": "g"}]',
    '[{"name": 1, "arguments": {}}]',
    '[{"name": ["g"], "arguments": {}}]',
    '[{"name": "g", "arguments": []}]',
    "[1]",
    '["g"]',
    "[[]]",
    json.dumps(f"[{G}]"),
    json.dumps("[]"),
    json.dumps("no JSON"),
    json.dumps('""'),
    f"[{G}",
]
THOUGHTS = ["", "<think>t</think>", "</think>t<think>", "<think>t", "t</think>"]
WRAPS = ["{}", "<tool_call>{}</tool_call>", "<tool_call>{}", "<tool_call>x</tool_call><tool_call>{}</tool_call>"]
WRAPS += ["<tool_call>{}</tool_call><tool_call>x</tool_call>", "<tool_call>{}</tool_call><tool_call>y"]
VERSIONS = ("v0", "v1", "v2", "v3", "v4", "llama")


def published(name: str, variant: str) -> list[float | None]:
    """What the published function gave, case by case."""
    recorded = json.loads((PARITY / f"{name}.json").read_text())
    return [recorded["values"][int(digit)] for digit in recorded[variant]]


def tool_n1_cases() -> list[tuple[str, str]]:
    """(response, gold answer)"""
    cases = product(GOLDS, THOUGHTS, WRAPS, BLOCKS)
    return [(thought + wrap.format(block), gold) for gold, thought, wrap, block in cases]


@pytest.mark.parametrize("version", VERSIONS)
def test_tool_n1(version: str) -> None:
    for (response, gold), expected in zip(tool_n1_cases(), published("tool_n1", version), strict=True):
        if expected is not None:
            ours = total("tool_n1", episode(task(gold), response), version=version)
            assert ours == pytest.approx(expected), (response, gold)


GOLD_ANSWERS = ["Paris", "City of Light"]
INFORMATION = "\n\n<information>Rome is not in France.</information>\n\n"
INVALID = "\nMy previous action is invalid. Let me try again.\n"
_PIECES = ["<think>", "</think>", "<answer>", "</answer>", "Paris", "the city of light", "Rome", " ", "\n", "so"]
_GOOD = ["<think>so</think>", "<answer>Paris</answer>", "<answer> Rome </answer>"]
_WHOLE = ["<think>so</think> <answer>Paris</answer>", "<think>so</think>\n<answer>Rome</answer>", "<answer>Paris"]


def search_r1_cases() -> list[list[str]]:
    """Texts of an episode's turns: those written out, and random ones. A turn ends where the policy is cut off."""
    draw = Random(0)
    cases = [
        ["<answer>Paris<answer>Paris</answer>"],
        ["<answer><answer>Paris</answer>"],
        ["<answer>Rome</answer><answer>Paris"],
        ["<answer>Rome</answer><answer>x<answer>Paris</answer>"],
        ["<answer>Paris", "</answer>"],
        ["<answer>", "Paris</answer>"],
        ["<think>so</think><answer>Paris", "<answer>Paris</answer>"],
        ["<think>so</think> <search>q</search>", "<think>so</think>\n<answer>Paris</answer>"],
    ]
    for _ in range(500):
        asks = draw.choices(["<search>q</search>", "<think>so</think> <search>q</search>", ""], k=draw.randrange(3))
        turns = [draw.choice(["", "", draw.choice(_PIECES + _GOOD)]) + ask for ask in asks]
        wild = "".join(draw.choices(_PIECES + 2 * _GOOD, k=draw.randrange(1, 7)))
        cases.append([*turns, draw.choice([wild, *_WHOLE])])
    return cases


def observed(turn: str) -> str:
    """What a turn is answered by."""
    return INFORMATION if turn.endswith("</search>") else INVALID


def played(turns: list[str]) -> Trajectory:
    trajectory = episode(task(json.dumps(GOLD_ANSWERS)), *turns)
    shown = [
        replace(turn, responses=(Message("tool", observed(turn.message.content)),)) for turn in trajectory.turns[:-1]
    ]
    return replace(trajectory, turns=(*shown, trajectory.turns[-1]))


@pytest.mark.parametrize("form", ["exact_match", "with_form"])
def test_search_r1(form: str) -> None:
    expectations = published("search_r1", form)
    assert len({*expectations}) == (2 if form == "exact_match" else 5)  # every value that there is
    for turns, expected in zip(search_r1_cases(), expectations, strict=True):
        ours = total("search_r1", played(turns), with_form=form == "with_form")
        assert ours == pytest.approx(expected), turns
