"""From tools and phrases to what a user says and the calls that answer it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from scripts.mini import phrases
from scripts.mini.tools import Lookup, ToolSpec
from scripts.mini.values import Values, spoken

_REFERABLE = re.compile(r"\[(.*?)\]")  # the part of a request that a list of values or a reference may replace


@dataclass(frozen=True, slots=True)
class World:
    """What one split may draw from."""

    tools: tuple[ToolSpec, ...]
    lookups: tuple[Lookup, ...]
    values: Values
    held_out: bool  # which part of the phrasings

    def phrase(self, pair: tuple[Sequence[str], Sequence[str]], random: Random) -> str:
        """One sentence of this split's part."""
        return random.choice(pair[self.held_out])

    def request(self, tool: ToolSpec, random: Random) -> str:
        """One request, with its slots, that means `tool`."""
        return random.choice(tool.held_out_requests if self.held_out else tool.requests)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a tool with its values, in the tool's order of parameters."""

    tool: ToolSpec
    values: tuple[Any, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """The values as the user says them."""
        return tuple(spoken(p.kind, value) for p, value in zip(self.tool.parameters, self.values, strict=True))

    def fill(self, text: str) -> str:
        """The text with this call's values in its slots."""
        return text.format(**{p.name: word for p, word in zip(self.tool.parameters, self.words, strict=True)})


def draw_call(tool: ToolSpec, world: World, random: Random) -> Call:
    """A call of the tool with fresh values, all different."""
    while True:
        values = tuple(world.values.draw(parameter.kind, random) for parameter in tool.parameters)
        if len(set(values)) == len(values):
            return Call(tool, values)


def say_call(call: Call, world: World, random: Random) -> str:
    """The request for one call."""
    return call.fill(_REFERABLE.sub(r"\1", world.request(call.tool, random)))


def say_list(calls: Sequence[Call], world: World, random: Random) -> str:
    """One request for two or three calls of one tool of one parameter: "play music by Kala and Miri"."""
    joiner = random.choice([text for text in phrases.LISTS[world.held_out] if text.count("{") == len(calls)])

    def every(part: re.Match[str]) -> str:
        return joiner.format(**dict(zip("xyz", (call.fill(part[1]) for call in calls), strict=False)))

    return _REFERABLE.sub(every, world.request(calls[0].tool, random))


def say_reference(tool: ToolSpec, reference: str, world: World, random: Random) -> str:
    """The request for a call whose value the user only refers to: "check the weather in my city"."""
    return _REFERABLE.sub(reference, world.request(tool, random))


def can_list(tool: ToolSpec) -> bool:
    """Whether one request can name several values of this tool."""
    return all(_REFERABLE.search(text) for text in (*tool.requests, *tool.held_out_requests))


def sentence(frame: str, **parts: str) -> str:
    """A frame with its parts, {a} as it is and {A} with a capital letter."""
    return frame.format(**parts, **{name.capitalize(): text[0].upper() + text[1:] for name, text in parts.items()})
