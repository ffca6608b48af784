"""The families of tasks: each draws what was said, which calls answer it, and which tools must (not) be listed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from scripts.mini import phrases
from scripts.mini.requests import Call, World, can_list, draw_call, say_call, say_list, say_reference, sentence
from scripts.mini.tools import ToolSpec
from verl.data.rlla import CALL_THOUGHT, RESPONSE_THOUGHT, observation
from verl.utils.reward_score.parsing import render_response


@dataclass(frozen=True, slots=True)
class Draft:
    """A task before its tool list is drawn up. No calls: the gold response says that no tool can do it."""

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
    text = sentence(world.phrase(phrases.ONE, random), a=say_call(call, world, random))
    return Draft((_user(text),), (call,), (call.tool,))


def multiple(world: World, random: Random) -> Draft:
    """Two requests for two tools, one of them now and then a lookup."""
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
    text = sentence(world.phrase(phrases.ONE, random), a=say_list(calls, world, random))
    return Draft((_user(text),), calls, (tool,))


def _two_requests(calls: tuple[Call, ...], world: World, random: Random) -> Draft:
    first, second = (say_call(call, world, random) for call in calls)
    text = sentence(world.phrase(phrases.TWO, random), a=first, b=second)
    return Draft((_user(text),), calls, tuple(dict.fromkeys(call.tool for call in calls)))


def irrelevant(world: World, random: Random) -> Draft:
    """A request for a tool that is not listed, nor any of its domain, which might serve as well."""
    asked = single(world, random)
    domain = asked.needed[0].domain
    return Draft(asked.turns, (), (), unwanted=tuple(tool for tool in world.tools if tool.domain == domain))


def observed(world: World, random: Random) -> Draft:
    """A request that refers to a value; a lookup has just answered with it."""
    lookup = random.choice(world.lookups)
    call = Call(random.choice(lookup.fits), (world.values.draw(lookup.kind, random),))
    asked = say_reference(call.tool, lookup.reference, world, random)
    lookup_response = render_response(CALL_THOUGHT, [{"name": lookup.tool.name, "parameters": {}}])
    answer = observation([{"name": lookup.tool.name, "results": call.values[0]}])
    turns = (_user(sentence(world.phrase(phrases.ONE, random), a=asked)), f"{lookup_response}\n{answer}")
    return Draft(turns, (call,), (lookup.tool, call.tool))


def told(world: World, random: Random) -> Draft:
    """A request that refers to a value; the user named it in an earlier turn."""
    lookup = random.choice(world.lookups)
    call = Call(random.choice(lookup.fits), (world.values.draw(lookup.kind, random),))
    fact = sentence(world.phrase(phrases.TOLD, random), ref=lookup.reference, v=call.words[0])
    asked = say_reference(call.tool, lookup.reference, world, random)
    turns = (
        _user(fact),
        render_response(RESPONSE_THOUGHT, response=phrases.NOTED),
        _user(sentence(world.phrase(phrases.ONE, random), a=asked)),
    )
    return Draft(turns, (call,), (call.tool,), unwanted=(lookup.tool,))


def masked(world: World, random: Random) -> Draft:
    """One call, or parallel calls, of a tool whose name says nothing."""
    return replace(random.choice((single, parallel))(world, random), masked=True)


FAMILIES: dict[str, tuple[Callable[[World, Random], Draft], float]] = {  # draw, share of a split
    "single": (single, 0.13),
    "multiple": (multiple, 0.25),
    "parallel": (parallel, 0.46),
    "irrelevant": (irrelevant, 0.04),
    "observed": (observed, 0.02),
    "told": (told, 0.04),
    "masked": (masked, 0.06),
}
