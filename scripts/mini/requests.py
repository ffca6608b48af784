"""User requests, and the calls that answer them, from tools and phrases."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from scripts.mini import phrases
from scripts.mini.tools import Lookup, ToolSpec
from scripts.mini.values import Values, spoken

_REFERABLE = re.compile(r"\[(.*?)\]")  # the part of a request that a list of values or a reference can replace


@dataclass(frozen=True, slots=True)
class World:
    """The pools of one split."""

    tools: tuple[ToolSpec, ...]
    lookups: tuple[Lookup, ...]
    values: Values
    held_out: bool  # selects the part of the phrasings

    def phrase(self, pair: tuple[Sequence[str], Sequence[str]], random: Random) -> str:
        """One sentence of this split's part."""
        return random.choice(pair[self.held_out])

    def request(self, tool: ToolSpec, random: Random) -> str:
        """A request template for `tool`."""
        return random.choice(tool.held_out_requests if self.held_out else tool.requests)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a tool, with values in the order of its parameters."""

    tool: ToolSpec
    values: tuple[Any, ...]

    @property
    def texts(self) -> tuple[str, ...]:
        """The values as written by the user."""
        return tuple(spoken(p.kind, value) for p, value in zip(self.tool.parameters, self.values, strict=True))

    def fill(self, template: str) -> str:
        """The template with this call's values."""
        return template.format(**{p.name: text for p, text in zip(self.tool.parameters, self.texts, strict=True)})


def draw_call(tool: ToolSpec, world: World, random: Random) -> Call:
    """A call of the tool with new, distinct values."""
    while True:
        values = tuple(world.values.draw(parameter.kind, random) for parameter in tool.parameters)
        if len(set(values)) == len(values):
            return Call(tool, values)


def request_text(call: Call, world: World, random: Random) -> str:
    """The request for one call."""
    return call.fill(_REFERABLE.sub(r"\1", world.request(call.tool, random)))


def list_text(calls: Sequence[Call], world: World, random: Random) -> str:
    """One request for two or three calls of a tool with one parameter: "play music by Kala and Miri"."""
    joiner = random.choice([text for text in phrases.LISTS[world.held_out] if text.count("{") == len(calls)])

    def every(part: re.Match[str]) -> str:
        return joiner.format(**dict(zip("xyz", (call.fill(part[1]) for call in calls), strict=False)))

    return _REFERABLE.sub(every, world.request(calls[0].tool, random))


def reference_text(tool: ToolSpec, reference: str, world: World, random: Random) -> str:
    """The request for a call whose value is a reference: "check the weather in my city"."""
    return _REFERABLE.sub(reference, world.request(tool, random))


def can_list(tool: ToolSpec) -> bool:
    """Whether one request can contain several values of this tool."""
    return all(_REFERABLE.search(text) for text in (*tool.requests, *tool.held_out_requests))


def sentence(frame: str, **parts: str) -> str:
    """A frame filled with parts: {a} unchanged, {A} capitalized."""
    return frame.format(**parts, **{name.capitalize(): text[0].upper() + text[1:] for name, text in parts.items()})
