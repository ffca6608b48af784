"""The splits, and the construction of rows from drafts: tool list and gold response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from scripts.mini import domains, new_tools, phrases
from scripts.mini.families import FAMILIES, Draft
from scripts.mini.listing import draw_tools, instruction, mask
from scripts.mini.requests import Call, World
from scripts.mini.tools import read_lookups, read_tools
from scripts.mini.values import split_values
from scripts.raw.rlla import CALL_THOUGHT, RESPONSE_THOUGHT, dialogue, to_row
from verl.formats.toolrl_text import render_response

CARELESS = 0.6  # share of careless demonstrations among those with several calls


@dataclass(frozen=True, slots=True)
class Split:
    """One file of the dataset, drawn from `world`; `reasons`: real thoughts instead of placeholders.

    `careless`: share of responses with several gold calls whose thought has all calls but which make only the first.
    """

    name: str
    num_rows: int
    world: World
    reasons: bool = False
    careless: float = 0.0


def all_splits(seed: int, careless: float = CARELESS) -> tuple[Split, ...]:
    """The four files in drawing order; only the demonstrations of `sft` can be careless."""
    seen_values, unseen_values = split_values(seed)
    seen_tools, new = read_tools(domains.TOOLS), read_tools(new_tools.TOOLS)
    lookups, new_lookups = read_lookups(domains.LOOKUPS, seen_tools), read_lookups(new_tools.LOOKUPS, new)
    training = World(seen_tools, lookups, seen_values, held_out=False)
    return (
        Split("test", 200, World(seen_tools, lookups, unseen_values, held_out=True)),
        Split("test_new_tools", 200, World(new, new_lookups, unseen_values, held_out=True)),
        Split("train", 2400, training),
        Split("sft", 4800, training, reasons=True, careless=careless),
    )


def build(seed: int, careless: float = CARELESS) -> dict[str, list[dict[str, Any]]]:
    """All rows of all splits, with unique prompts across splits.

    `careless` affects responses of `sft`, never a prompt.
    """
    prompts: set[tuple[str, str]] = set()
    return {split.name: _rows(split, Random(f"{seed}/{split.name}"), prompts) for split in all_splits(seed, careless)}


def _rows(split: Split, random: Random, prompts: set[tuple[str, str]]) -> list[dict[str, Any]]:
    """The rows of one split in random order; their prompts are added to `prompts`."""
    examples: list[dict[str, str]] = []
    for draw, share in FAMILIES.values():
        wanted = len(examples) + round(share * split.num_rows)
        while len(examples) < wanted:
            example = _example(draw(split.world, random), split, random)
            if example and (example["instruction"], example["input"]) not in prompts:
                prompts.add((example["instruction"], example["input"]))
                examples.append(example)
    random.shuffle(examples)
    return [to_row(example, split.name, index) for index, example in enumerate(examples)]


def _example(draft: Draft, split: Split, random: Random) -> dict[str, str] | None:
    """The draft as a raw example; None if its prompt is too long even with two tools."""
    text = dialogue(draft.turns)
    tools, calls = draw_tools(draft, len(text), split.world, random), draft.calls
    if not tools:
        return None
    if draft.masked:
        tools, calls = mask(tools, calls, random)
    return {"instruction": instruction(tools), "input": text, "output": _response(draft, calls, split, random)}


def _response(draft: Draft, calls: Sequence[Call], split: Split, random: Random) -> str:
    """The gold response, or a careless one, with a short thought or ToolRL's placeholder."""
    made = calls[:1] if random.random() < split.careless else calls
    if not calls:
        thought = random.choice(phrases.THOUGHTS["none"]) if split.reasons else RESPONSE_THOUGHT
        return render_response(thought, response=phrases.NO_TOOL)
    named = [
        {
            "name": call.tool.name,
            "parameters": {p.name: v for p, v in zip(call.tool.parameters, call.values, strict=True)},
        }
        for call in made
    ]
    return render_response(_thought(draft, calls, random) if split.reasons else CALL_THOUGHT, named)


def _thought(draft: Draft, calls: Sequence[Call], random: Random) -> str:
    """A thought that names the tools and their values: "I call get_rain with Kala and Miri, set_timer with 27"."""
    kind = "dialogue" if len(draft.turns) > 1 else "call"
    values: dict[str, list[str]] = {}
    for call in calls:
        values.setdefault(call.tool.name, []).append(" ".join(text.strip('"') for text in call.texts))
    known = [f"{tool} with {' and '.join(texts)}" if texts[0] else tool for tool, texts in values.items()]
    return random.choice(phrases.THOUGHTS[kind]).format(
        calls=", ".join(known), tool=calls[0].tool.name, value=values[calls[0].tool.name][0]
    )
