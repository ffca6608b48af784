"""The tool list of a prompt: distractors next to the needed tools, in random order, optionally masked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from random import Random

from scripts.mini.families import Draft
from scripts.mini.reading import MASK
from scripts.mini.requests import Call, World
from scripts.mini.tools import Parameter, ToolSpec
from scripts.mini.values import JSON_TYPES
from scripts.raw.rlla import ListedTool, tool_list

INSTRUCTION = "Call tools or respond."
MAX_PROMPT_CHARS = 600
_NUM_TOOLS = (2, 3, 4)
_NUM_TOOLS_WEIGHTS = (1, 2, 17)
_NEAR_SHARE = 0.3  # share of distractors from the domain of a needed tool
_MASKS = [f"{MASK}{letter}{digit}" for letter in "bdfghjkmprtvwxz" for digit in range(10)]


def _as_tool(tool: ToolSpec) -> ListedTool:
    parameters = {
        p.name: {"description": p.description, "type": JSON_TYPES.get(p.kind, "str"), "default": ""}
        for p in tool.parameters
    }
    return ListedTool(tool.name, tool.description, parameters)


def instruction(tools: Sequence[ToolSpec]) -> str:
    """The system text."""
    return f"{INSTRUCTION}\n\n{tool_list(map(_as_tool, tools))}"


@cache
def _added_chars(tool: ToolSpec) -> int:
    """The number of characters that the tool adds to a prompt; masking adds none."""
    return len(instruction([tool])) - len(instruction([]))


def draw_tools(draft: Draft, dialogue_chars: int, world: World, random: Random) -> list[ToolSpec]:
    """The listed tools in random order: the needed ones and distractors, some from a needed tool's domain.

    Fewer than drawn if the prompt, with a user message of `dialogue_chars`, would exceed the limit; none if it has no
    room for two.
    """
    tools = list(draft.needed)
    num_tools = random.choices(_NUM_TOOLS, _NUM_TOOLS_WEIGHTS)[0]
    others = [*world.tools, *(lookup.tool for lookup in world.lookups)]
    others = [tool for tool in others if tool not in (*draft.needed, *draft.unwanted)]
    smallest = min(map(_added_chars, others))
    room = MAX_PROMPT_CHARS - dialogue_chars - len(instruction([])) - sum(map(_added_chars, tools))
    while len(tools) < num_tools:
        allowed = max(room - smallest * (num_tools - len(tools) - 1), smallest)  # reserves room for further tools
        fitting = [tool for tool in others if tool not in tools and _added_chars(tool) <= min(allowed, room)]
        if not fitting:
            break
        tools.append(_draw_other(fitting, draft, random))
        room -= _added_chars(tools[-1])
    random.shuffle(tools)
    return tools if room >= 0 and len(tools) >= _NUM_TOOLS[0] else []


def _draw_other(fitting: Sequence[ToolSpec], draft: Draft, random: Random) -> ToolSpec:
    near = {tool.domain for tool in (*draft.needed, *draft.unwanted)}
    close = [tool for tool in fitting if tool.domain in near] if random.random() < _NEAR_SHARE else []
    return random.choice(close or fitting)


def mask(tools: Sequence[ToolSpec], calls: Sequence[Call], random: Random) -> tuple[list[ToolSpec], tuple[Call, ...]]:
    """Hammer's masking (arXiv 2410.04587): names of functions and parameters become random strings."""
    masks: dict[ToolSpec, ToolSpec] = {}
    names = random.sample(_MASKS, len(tools))
    for tool, name in zip(tools, names, strict=True):
        numbers = random.sample(range(1, 10), len(tool.parameters))
        hidden = (Parameter(f"p{n}", p.description, p.kind) for n, p in zip(numbers, tool.parameters, strict=True))
        masks[tool] = replace(tool, name=name, parameters=tuple(hidden))
    return list(masks.values()), tuple(replace(call, tool=masks[call.tool]) for call in calls)
