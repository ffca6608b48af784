"""The task families: each draws a dialogue, the calls that answer it, and the tools to list or to exclude."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from scripts.mini import phrases
from scripts.mini.requests import Call, World, can_list, draw_call, list_text, reference_text, request_text, sentence
from scripts.mini.tools import ToolSpec
from scripts.raw.rlla import CALL_THOUGHT, RESPONSE_THOUGHT, observation
from verl.formats.toolrl_text import render_response


@dataclass(frozen=True, slots=True)
class Draft:
    """A task without its tool list. No calls: the gold response is that no tool fits."""

    turns: tuple[str, ...]
    calls: tuple[Call, ...]
    needed: tuple[ToolSpec, ...]
    unwanted: tuple[ToolSpec, ...] = ()  # tools that would make the task ambiguous
    masked: bool = False


def _user(text: str) -> str:
    return f"<user> {text} </user>"


def single(world: World, random: Random) -> Draft:
    """One request, one call."""
    call = draw_call(random.choice(world.tools), world, random)
    text = sentence(world.phrase(phrases.ONE, random), a=request_text(call, world, random))
    return Draft((_user(text),), (call,), (call.tool,))


def multiple(world: World, random: Random) -> Draft:
    """Two requests for two tools, occasionally with a lookup."""
    tools = random.sample(world.tools, 2)
    if random.random() < 0.1:
        tools[random.randrange(2)] = random.choice(world.lookups).tool
    calls = tuple(draw_call(tool, world, random) for tool in tools)
    return _two_requests(calls, world, random)


def parallel(world: World, random: Random) -> Draft:
    """The same tool two or three times, with different values."""
    tool = random.choice(world.tools)
    num_calls = random.choice((2, 3)) if can_list(tool) else 2
    calls: tuple[Call, ...] = ()
    while len(set(calls)) < num_calls:
        calls = tuple(draw_call(tool, world, random) for _ in range(num_calls))
    if not can_list(tool):
        return _two_requests(calls, world, random)
    text = sentence(world.phrase(phrases.ONE, random), a=list_text(calls, world, random))
    return Draft((_user(text),), calls, (tool,))


def _two_requests(calls: tuple[Call, ...], world: World, random: Random) -> Draft:
    first, second = (request_text(call, world, random) for call in calls)
    text = sentence(world.phrase(phrases.TWO, random), a=first, b=second)
    return Draft((_user(text),), calls, tuple(dict.fromkeys(call.tool for call in calls)))


def irrelevant(world: World, random: Random) -> Draft:
    """A request for an unlisted tool; tools of its domain, which might also fit, are not listed either."""
    request = single(world, random)
    domain = request.needed[0].domain
    return Draft(request.turns, (), (), unwanted=tuple(tool for tool in world.tools if tool.domain == domain))


def observed(world: World, random: Random) -> Draft:
    """A request that refers to a value from the preceding lookup."""
    lookup = random.choice(world.lookups)
    call = Call(random.choice(lookup.fits), (world.values.draw(lookup.kind, random),))
    request = reference_text(call.tool, lookup.reference, world, random)
    lookup_response = render_response(CALL_THOUGHT, [{"name": lookup.tool.name, "parameters": {}}])
    answer = observation([{"name": lookup.tool.name, "results": call.values[0]}])
    turns = (_user(sentence(world.phrase(phrases.ONE, random), a=request)), f"{lookup_response}\n{answer}")
    return Draft(turns, (call,), (lookup.tool, call.tool))


def stated(world: World, random: Random) -> Draft:
    """A request that refers to a value that the user stated in an earlier turn."""
    lookup = random.choice(world.lookups)
    call = Call(random.choice(lookup.fits), (world.values.draw(lookup.kind, random),))
    fact = sentence(world.phrase(phrases.STATED, random), ref=lookup.reference, v=call.texts[0])
    request = reference_text(call.tool, lookup.reference, world, random)
    turns = (
        _user(fact),
        render_response(RESPONSE_THOUGHT, response=phrases.NOTED),
        _user(sentence(world.phrase(phrases.ONE, random), a=request)),
    )
    return Draft(turns, (call,), (call.tool,), unwanted=(lookup.tool,))


def masked(world: World, random: Random) -> Draft:
    """One call, or parallel calls, of a tool with a masked name."""
    return replace(random.choice((single, parallel))(world, random), masked=True)


FAMILIES: dict[str, tuple[Callable[[World, Random], Draft], float]] = {  # draw, share of a split
    "single": (single, 0.13),
    "multiple": (multiple, 0.25),
    "parallel": (parallel, 0.46),
    "irrelevant": (irrelevant, 0.04),
    "observed": (observed, 0.02),
    "stated": (stated, 0.04),
    "masked": (masked, 0.06),
}
