"""Responses that have to call: grammars of vLLM's structured outputs, in the tool-call format of the training.

A format has no grammar of its own. It is read off calls that the format renders: what is written around a name, around
the arguments, and between two calls. The result is a structural tag of xgrammar, as JSON.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolrl.formats.typed import argument_types
from verl.errors import ConfigError, DataError
from verl.formats.base import ToolCallFormat
from verl.formats.toolrl_text import THINK, THINK_END
from verl.text import shared_start
from verl.types import ToolCall, ToolSpec

Grammar = dict[str, Any]
Render = Callable[[Sequence[ToolCall]], str]
_NAMES, _KEYS, _VALUES = (tuple(f"Trial{kind}{number}" for number in "12") for kind in ("Tool", "Key", "Value"))
_ARGUMENTS = re.compile(rf'\{{\s*"{_KEYS[0]}"\s*:\s*"{_VALUES[0]}"\s*\}}')
_NO_GRAMMAR = "tool_choice can be auto or none: the calls of this tool-call format have no simple grammar"
_TEXT: Grammar = {"type": "any_text"}
ALLOWED_TOOLS = "allowed_tools"  # names, in a request to vLLM, whose chat completions have no such tool_choice


def call_grammar(
    tool_call_format: ToolCallFormat,
    tools: Sequence[ToolSpec],
    is_valid: Callable[[Mapping[str, Any]], bool],
    *,
    required: bool = True,
    single: bool = False,
) -> Grammar:
    """The structural tag of responses that call one of these tools, after a thought.

    is_valid: whether the engine knows this JSON schema
    required: without it a text without calls fits, too, and so does a text before them
    single: one call at most
    Raises ConfigError for a format that renders no calls.
    """
    render: Render | None = getattr(tool_call_format, "render", None)
    if render is None:
        raise ConfigError(
            "tool_choice can be auto or none: this tool-call format has no `render`, so that no grammar is known"
        )
    argument = getattr(tool_call_format, "single_tool", (None, None))[1]
    if argument is not None:  # pauses after its call, which any text may precede
        opening, closing = render([ToolCall(_NAMES[0], {argument: _VALUES[0]})]).split(_VALUES[0])
        calls: list[Grammar] = [_until(closing)]
    else:
        writing = _Writing.of(render)
        opening, calls = writing.opening, writing.calls(tools, is_valid, single)
    if not required:
        without = {"type": "any_text", "excludes": [opening.strip()]}
        return _tag(_or([_sequence([_until(opening), *calls]), without]))
    before = [_until(opening)] if argument is not None else [*_thought(tool_call_format), _const(opening)]
    return _tag(_sequence([*before, *calls]))


@dataclass(frozen=True)
class _Writing:
    """Text that a format writes around the parts of calls.

    opening: before the first name; between: from the end of a call to the next name, None if a turn has one call
    closing: after the last call; start: from a name to its arguments, if they are one JSON object
    each: how arguments are written if they are not
    """

    opening: str
    between: str | None
    closing: str
    start: str
    each: "_EachArgument | None" = None

    @classmethod
    def of(cls, render: Render) -> "_Writing":
        """Raises ConfigError for a format whose calls have other syntax."""
        first, second = (ToolCall(name, {_KEYS[0]: _VALUES[0]}) for name in _NAMES)
        opening, rest = _split(render([first]).rpartition(THINK_END)[2].lstrip(), _NAMES[0])
        match = _ARGUMENTS.search(rest)
        each = None if match else _EachArgument.of(render)
        mark, end = (match[0], "") if match else (_VALUES[0], each.end if each else "")
        start, closing = _split(rest, mark)
        try:
            pair = _split(render([first, second]), *_NAMES)[1]
        except DataError:
            return cls(opening, None, closing.removeprefix(end), start, each)
        between = _split(pair, mark)[1]
        return cls(opening, between.removeprefix(end), closing.removeprefix(end), start, each)

    def calls(
        self, tools: Sequence[ToolSpec], is_valid: Callable[[Mapping[str, Any]], bool], single: bool
    ) -> list[Grammar]:
        one = _or([self._call(tool, is_valid) for tool in tools])
        single = single or self.between is None
        more = [] if single else [{"type": "star", "content": _sequence([_const(self.between or ""), one])}]
        return [one, *more, *_texts(self.closing)]

    def _call(self, tool: ToolSpec, is_valid: Callable[[Mapping[str, Any]], bool]) -> Grammar:
        schema = _known(tool, is_valid)
        if self.each is not None:
            return _sequence([_const(tool.name), self.each.grammar(tool, schema)])
        return _sequence([_const(tool.name + self.start), {"type": "json_schema", "json_schema": schema}])


@dataclass(frozen=True)
class _EachArgument:
    """Text that a format writes around arguments that are not one JSON object.

    start: from the tool's name to the first key; assign: from a key to its value; next: from a value to the next key
    end: after the last value; none: after the name of a call without arguments
    """

    start: str
    assign: str
    next: str
    end: str
    none: str

    @classmethod
    def of(cls, render: Render) -> "_EachArgument":
        """Raises ConfigError for quoted texts, whose end is no fixed text."""
        name, (key, other), (value, _) = _NAMES[0], _KEYS, _VALUES

        def after_name(arguments: Mapping[str, Any]) -> str:
            return render([ToolCall(name, arguments)]).rpartition(name)[2]

        start, assign, after = _split(after_name(dict(zip(_KEYS, _VALUES, strict=True))), key, value)
        following, _, last = _split(after, other, _VALUES[1])
        if f"{key}{assign}1" not in after_name({key: 1}):
            raise ConfigError(_NO_GRAMMAR)
        _, *none = _split(render([ToolCall(each, {}) for each in _NAMES]), *_NAMES)
        pair = render([ToolCall(each, {key: value}) for each in _NAMES])
        between = _split(_split(pair, *_NAMES)[1], value)[1]
        return cls(start, assign, following, shared_start(between, last), shared_start(*none))

    def grammar(self, tool: ToolSpec, schema: Mapping[str, Any]) -> Grammar:
        """The arguments in the order of the schema; those that are not required may be left out."""
        properties = schema.get("properties") or {}
        needed = [name for name in properties if name in (schema.get("required") or ())]
        optional = [name for name in properties if name not in needed]
        if needed:
            return self._from(tool, schema, needed, optional)
        starts = [self._from(tool, schema, [name], optional[place + 1 :]) for place, name in enumerate(optional)]
        return _or([_const(self.none), *starts])

    def _from(
        self, tool: ToolSpec, schema: Mapping[str, Any], needed: Sequence[str], optional: Sequence[str]
    ) -> Grammar:
        closing = shared_start(self.next, self.end)  # closes a value
        parts: list[Grammar] = []
        for place, name in enumerate((*needed, *optional)):
            types = argument_types([tool], tool.name, name)
            is_text = not types or "string" in types
            own = schema["properties"][name]
            before = self.start if place == 0 else self.next.removeprefix(closing)
            value = [_until(closing)] if is_text else [{"type": "json_schema", "json_schema": own}, *_texts(closing)]
            if is_text and isinstance(own, Mapping) and "enum" in own:
                value = [_or([_const(f"{each}{closing}") for each in own["enum"]])]
            part = _sequence([_const(before + name + self.assign), *value])
            parts.append(part if place < len(needed) else {"type": "optional", "content": part})
        return _sequence([*parts, *_texts(self.end.removeprefix(closing))])


def _thought(tool_call_format: ToolCallFormat) -> list[Grammar]:
    """Text that may or must precede a call."""
    line_breaks = {"type": "regex", "pattern": r"\n{1,3}"}
    if getattr(tool_call_format, "in_thought", False):
        return [_until(THINK_END), line_breaks]
    opening = {"type": "regex", "pattern": rf"\n?{THINK}"}
    thought = _sequence([opening, _until(THINK_END), line_breaks])
    return [thought if getattr(tool_call_format, "needs_thought", False) else {"type": "optional", "content": thought}]


def _known(tool: ToolSpec, is_valid: Callable[[Mapping[str, Any]], bool]) -> Mapping[str, Any]:
    """The schema of the arguments, or their names alone: rows have schemas with types of their own, such as `str`."""
    schema = {"type": "object", **tool.parameters}
    if is_valid(schema):
        return schema
    names = dict.fromkeys(schema.get("properties") or (), True)
    return {"type": "object", "properties": names, "required": [*(schema.get("required") or ())]}


def _split(text: str, *marks: str) -> list[str]:
    """The text between the first occurrences of these marks, one after another. Raises ConfigError."""
    parts = []
    for mark in marks:
        before, separator, text = text.partition(mark)
        if not separator:
            raise ConfigError(_NO_GRAMMAR)
        parts.append(before)
    return [*parts, text]


def _until(end: str) -> Grammar:
    """Any text up to this one, which is part of it."""
    return {"type": "tag", "begin": "", "content": _TEXT, "end": end}


def _const(text: str) -> Grammar:
    return {"type": "const_string", "value": text}


def _texts(text: str) -> list[Grammar]:
    return [_const(text)] if text else []


def _sequence(elements: list[Grammar]) -> Grammar:
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}


def _or(elements: list[Grammar]) -> Grammar:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


def _tag(form: Grammar) -> Grammar:
    return {"type": "structural_tag", "format": form}
