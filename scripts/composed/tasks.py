"""Tasks of every family: dialogue, listed tools, gold calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from scripts.composed.lexicon import NEW_NOUNS, NOUNS, TERMS, VERBS, is_new
from scripts.composed.slots import SLOTS, VARYING, Slot, Value, Values
from scripts.mini import phrases
from scripts.mini.reading import MASK
from scripts.mini.requests import sentence
from scripts.raw.rlla import ListedTool
from verl.formats.toolrl_text import render_response

_NUM_TOOLS, _NUM_TOOLS_WEIGHTS = (2, 3, 4), (2, 5, 3)
_NUM_PARAMETERS, _NUM_PARAMETERS_WEIGHTS = (0, 1, 2, 3), (1, 4, 4, 1)
_NEAR_SHARE = 0.6  # share of further tools that share a verb or a noun with a needed one


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a drawn tool."""

    kind: str  # of SLOTS
    name: str
    description: str

    @property
    def slot(self) -> Slot:
        return SLOTS[self.kind]


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool of one row. plain: its name, if it were not masked."""

    verb: str
    noun: str
    name: str
    parameters: tuple[Parameter, ...]
    plain: str

    @property
    def listed(self) -> ListedTool:
        parameters = {
            each.name: {"description": each.description, "type": each.slot.type, "default": ""}
            for each in self.parameters
        }
        return ListedTool(self.name, f"{self.purpose}.", parameters)

    @property
    def purpose(self) -> str:
        """The name stands at its end: a small model copies what follows known terms, not what is before them."""
        return f"{self.verb} {self.noun} with {self.name}"


@dataclass(frozen=True, slots=True)
class Call:
    """One gold call, with values in the order of the tool's parameters."""

    tool: Tool
    values: tuple[Value, ...]

    @property
    def filled(self) -> list[tuple[Parameter, Value]]:
        return list(zip(self.tool.parameters, self.values, strict=True))

    def render(self, values: Sequence[Any] | None = None) -> dict[str, Any]:
        """As JSON; values: others than the gold ones."""
        written = [each.value for each in self.values] if values is None else values
        return {
            "name": self.tool.name,
            "parameters": {p.name: v for p, v in zip(self.tool.parameters, written, strict=True)},
        }


@dataclass(frozen=True, slots=True)
class Task:
    """A row before its rendering. `asked` is the parameter that the user must add; without it and calls, none fits.

    wanted: the calls that the user thinks of; reference: the user's terms for a stated value
    """

    family: str
    turns: tuple[str, ...]
    tools: tuple[Tool, ...]
    calls: tuple[Call, ...]
    wanted: tuple[Call, ...]
    asked: Parameter | None = None
    reference: str = ""

    @property
    def thought(self) -> str:
        """For each wanted call the tool, unless it is the one before, and the values as the user writes them."""
        parts: list[str] = []
        for place, call in enumerate(self.wanted):
            tool, steps = call.tool, []
            if place == 0 or tool != self.wanted[place - 1].tool:
                steps = [tool.purpose if tool in self.tools else f"{tool.verb} {tool.noun} with none"]
            if tool in self.tools:
                texts = ["missing" if p is self.asked else value.text for p, value in call.filled]
                steps += [f"{p.name} {text}" for (p, _), text in zip(call.filled, texts, strict=True)]
            parts.append(", ".join(steps))
        return f"{'; '.join(parts)}."

    @property
    def gold(self) -> str:
        """The right response."""
        if self.asked:
            return render_response(self.thought, response=f"Which {self.asked.slot.label}?")
        if not self.calls:
            return render_response(self.thought, response=phrases.NO_TOOL)
        return render_response(self.thought, [call.render() for call in self.calls])


class Source:
    """Draws tasks of one split.

    new_tools: of the held-out tools; held_out: other phrasings and values
    any_terms: share of the tasks whose tools are two terms of any kind: such tools can only be read, not known
    """

    def __init__(self, random: Random, held_out: bool = False, new_tools: bool = False, any_terms: float = 0.0) -> None:
        self.random = random
        self._any_terms = any_terms
        self._terms: tuple[str, ...] = ()
        self._held_out = held_out
        self._new_tools = new_tools
        self._nouns = NOUNS + NEW_NOUNS if new_tools else NOUNS
        self._combinations = [(verb, noun) for verb in VERBS for noun in self._nouns if is_new(verb, noun) == new_tools]

    def draw(self) -> Task:
        """A task of a random family."""
        family = self.random.choices(list(FAMILIES), [share for _, share in FAMILIES.values()])[0]
        return self.draw_of(family)

    def draw_of(self, family: str) -> Task:
        """A task of this family."""
        self._terms = TERMS if self._any_terms and self.random.random() < self._any_terms else ()
        task = FAMILIES[family][0](self, Values(self.random, self._held_out))
        return replace(task, family=family)

    def phrase(self, pair: tuple[Sequence[str], Sequence[str]]) -> str:
        return self.random.choice(pair[self._held_out])

    def combination(self) -> tuple[str, str]:
        """A verb and a noun of this split, or two of any terms, but no held-out combination."""
        while self._terms:
            first, second = self.random.sample(self._terms, 2)
            if not is_new(first, second):
                return first, second
        return self.random.choice(self._combinations)

    def verb(self, verb: str) -> str:
        """The verb or another word for it; of any terms only the word itself."""
        return verb if self._terms else self.random.choice((verb, VERBS[verb]))

    def tool(self, combination: tuple[str, str], kinds: Sequence[str] | None = None) -> Tool:
        """A tool with drawn names; kinds: of its parameters, by default drawn."""
        random, (verb, noun) = self.random, combination
        if kinds is None:
            kinds = random.sample(list(SLOTS), random.choices(_NUM_PARAMETERS, _NUM_PARAMETERS_WEIGHTS)[0])
        word = self.verb(verb)
        name = random.choice((f"{word}_{noun}", f"{word}_{noun}", f"{noun}_{word}"))
        parameters = tuple(
            Parameter(kind, random.choice(SLOTS[kind].names), SLOTS[kind].description(random)) for kind in kinds
        )
        return Tool(verb, noun, name, parameters, name)

    def call(self, tool: Tool, values: Values) -> Call:
        return Call(tool, tuple(each.slot.draw(values) for each in tool.parameters))

    def request(self, call: Call, omitted: Parameter | None = None, written: str | None = None) -> str:
        """An imperative sentence with the call's values in random order, without the omitted one.

        written: the text for its first value, such as a reference
        """
        random, tool = self.random, call.tool
        texts = [each.text for each in call.values]
        if written:
            texts[0] = written
        parts = [
            random.choice(p.slot.phrases).format(text)
            for p, text in zip(tool.parameters, texts, strict=True)
            if p is not omitted
        ]
        random.shuffle(parts)
        return " ".join((self.verb(tool.verb), f"the {tool.noun}", *parts))

    def with_others(self, needed: Sequence[Tool], unlisted: Sequence[Tool] = ()) -> tuple[Tool, ...]:
        """The needed tools and others, many of them near, in random order; none with the verb and noun of another."""
        random = self.random
        tools, taken = list(needed), {(tool.verb, tool.noun) for tool in (*needed, *unlisted)}
        num_tools = random.choices(_NUM_TOOLS, _NUM_TOOLS_WEIGHTS)[0]
        while len(tools) < num_tools:
            verb, noun = self.combination()
            if random.random() < _NEAR_SHARE:
                close = random.choice((*needed, *unlisted))
                verb, noun = random.choice(((close.verb, noun), (verb, close.noun)))
            if verb == noun or (verb, noun) in taken or is_new(verb, noun) != self._new_tools:
                continue
            tool = self.tool((verb, noun))
            if tool.name not in {each.name for each in tools}:
                taken.add((verb, noun))
                tools.append(tool)
        random.shuffle(tools)
        return tuple(tools)


def _user(text: str) -> str:
    return f"<user> {text} </user>"


def _one(source: Source, request: str) -> str:
    return _user(sentence(source.phrase(phrases.ONE), a=request))


def single(source: Source, values: Values) -> Task:
    """One request, one call."""
    call = source.call(source.tool(source.combination()), values)
    return Task("", (_one(source, source.request(call)),), source.with_others([call.tool]), (call,), (call,))


def multiple(source: Source, values: Values) -> Task:
    """Two requests for two tools."""
    first = source.tool(source.combination())
    second = first
    while (second.verb, second.noun) == (first.verb, first.noun) or second.name == first.name:
        second = source.tool(source.combination())
    calls = (source.call(first, values), source.call(second, values))
    text = sentence(source.phrase(phrases.TWO), a=source.request(calls[0]), b=source.request(calls[1]))
    return Task("", (_user(text),), source.with_others([first, second]), calls, calls)


def parallel(source: Source, values: Values) -> Task:
    """One tool, two or three calls that differ in one value."""
    random = source.random
    varying = random.choice(VARYING)
    others = [kind for kind in SLOTS if kind != varying]
    kinds = [varying, *random.sample(others, random.choice((0, 0, 1)))]
    random.shuffle(kinds)
    tool = source.tool(source.combination(), kinds)
    call, place = source.call(tool, values), kinds.index(varying)
    calls = [call]
    num_calls = random.choice((2, 2, 3))
    while len(calls) < num_calls:
        another = SLOTS[varying].draw(values)
        if another not in [each.values[place] for each in calls]:
            calls.append(Call(tool, (*call.values[:place], another, *call.values[place + 1 :])))
    phrase = random.choice(SLOTS[varying].phrases)
    texts = [phrase.format(each.values[place].text) for each in calls]
    request = f"{source.request(call, omitted=tool.parameters[place])} {', '.join(texts[:-1])} and {texts[-1]}"
    return Task("", (_one(source, request),), source.with_others([tool]), tuple(calls), tuple(calls))


def none(source: Source, values: Values) -> Task:
    """A request for a tool that is not listed, though near ones are."""
    call = source.call(source.tool(source.combination()), values)
    tools = source.with_others([], unlisted=[call.tool])
    return Task("", (_one(source, source.request(call)),), tools, (), (call,))


def missing(source: Source, values: Values) -> Task:
    """A request without one of the values that its tool needs."""
    random = source.random
    tool = source.tool(source.combination(), random.sample(list(SLOTS), random.choice((1, 2, 2))))
    call, asked = source.call(tool, values), random.choice(tool.parameters)
    text = _one(source, source.request(call, omitted=asked))
    return Task("", (text,), source.with_others([tool]), (), (call,), asked)


def dialogue(source: Source, values: Values) -> Task:
    """A request that refers to a value that the user stated in an earlier turn."""
    random = source.random
    kind = random.choice(VARYING)
    others = [each for each in SLOTS if each != kind]
    tool = source.tool(source.combination(), [kind, *random.sample(others, random.choice((0, 1)))])
    call, reference = source.call(tool, values), f"my {SLOTS[kind].label}"
    fact = sentence(source.phrase(phrases.STATED), ref=reference, v=call.values[0].text)
    turns = (
        _user(fact),
        render_response("no request.", response=phrases.NOTED),
        _one(source, source.request(call, written=reference)),
    )
    return Task("", turns, source.with_others([tool]), (call,), (call,), reference=reference)


def masked(source: Source, values: Values) -> Task:
    """One or several calls, but names are random: only descriptions distinguish (Hammer, arXiv 2410.04587)."""
    task = source.random.choice((single, single, multiple, parallel))(source, values)
    random, hidden = source.random, {}
    for tool in task.tools:
        name = f"{MASK}{random.choice('bdfghjkmprtvwxz')}{random.randrange(10)}"
        while name in {each.name for each in hidden.values()}:
            name = f"{MASK}{random.choice('bdfghjkmprtvwxz')}{random.randrange(10)}"
        numbers = random.sample(range(1, 10), len(tool.parameters))
        parameters = (replace(p, name=f"p{n}") for n, p in zip(numbers, tool.parameters, strict=True))
        hidden[tool] = replace(tool, name=name, parameters=tuple(parameters))
    calls = tuple(replace(call, tool=hidden[call.tool]) for call in task.calls)
    return replace(task, tools=tuple(hidden.values()), calls=calls, wanted=calls)


FAMILIES: dict[str, tuple[Callable[[Source, Values], Task], float]] = {  # draw, share of a split
    "single": (single, 0.22),
    "multiple": (multiple, 0.16),
    "parallel": (parallel, 0.16),
    "masked": (masked, 0.14),
    "dialogue": (dialogue, 0.10),
    "none": (none, 0.11),
    "missing": (missing, 0.11),
}
