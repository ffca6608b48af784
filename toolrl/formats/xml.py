"""Calls as tags: `<function=NAME><parameter=ARG>value</parameter></function>`, as in Qwen3-Coder and OpenHands."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from toolrl.formats.typed import argument_types, typed
from verl.formats import jinja
from verl.formats.base import Final, Parsed, ParseError
from verl.formats.prompt import TurnFormat
from verl.formats.split import Split, split_by_parsing
from verl.formats.text import BadCallError, each_call, find_spoken, parsed, skip_space, speech_start, to_json
from verl.formats.toolrl_text import THINK, THINK_END, TOOL_CALL, TOOL_CALL_END
from verl.types import ToolCall, ToolSpec

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_TAGS = (FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END, TOOL_CALL, TOOL_CALL_END, THINK, THINK_END)
_JINJA = (
    f"{{{{ {jinja.literal(FUNCTION)} ~ call.function.name ~ '>' }}}}"
    "{%- for key, value in call.function.arguments.items() -%}"
    f"{{{{ {jinja.literal(chr(10) + PARAMETER)} ~ key ~ '>\\n' }}}}"
    f"{{{{ value if value is string else escaped(value, {jinja.literal(list(_TAGS))}) }}}}"
    f"{{{{ {jinja.literal(chr(10) + PARAMETER_END)} }}}}"
    "{%- endfor -%}"
    f"{{{{ {jinja.literal(chr(10) + FUNCTION_END)} }}}}"
)
_NAME = re.compile(r"([^<>\n]+)>")


@dataclass(frozen=True)
class XmlFormat(TurnFormat):
    """`<tool_call>` around a function is optional.

    A value is parsed by the tool's schema: if that allows a string, the text is taken literally except for one newline
    at each end, even if it looks like a number, JSON or another parameter's tag; other types are parsed as JSON.
    Without a schema it is text. A value ends at the first `</parameter>`, as in OpenHands.
    """

    def parse(self, written: str, tools: Sequence[ToolSpec] = ()) -> Parsed:
        beginning = speech_start(written, self.in_thought)
        found = parsed(each_call(written, FUNCTION, beginning, partial(_read, tools=tools)))
        if isinstance(found, Final) and find_spoken(written, TOOL_CALL, beginning) >= 0:
            return ParseError(f"There is no {FUNCTION}NAME> .. {FUNCTION_END} in {TOOL_CALL}.")
        return found

    @property
    def openings(self) -> tuple[str, ...]:
        return (TOOL_CALL, FUNCTION)

    def split(self, text: str, tools: Sequence[ToolSpec] = ()) -> Split:
        """`<tool_call>` is no part of what is parsed."""
        found = split_by_parsing(lambda each: self.parse(each, tools), text).stripped()
        if not found.calls:
            return found
        return Split(
            found.before.removesuffix(TOOL_CALL), found.calls, found.after.removeprefix(TOOL_CALL_END)
        ).stripped()

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(map(_render, calls))

    def calls_jinja(self) -> str:
        return jinja.each_call(_JINJA, f"{TOOL_CALL}\n", f"\n{TOOL_CALL_END}")


def _read(written: str, position: int, tools: Sequence[ToolSpec]) -> tuple[ToolCall, int]:
    """(the call whose name starts here, end of its closing tag)"""
    name, position = _name(written, position, FUNCTION)
    arguments: dict[str, Any] = {}
    while True:
        position = skip_space(written, position)
        if written.startswith(FUNCTION_END, position):
            return ToolCall(name, arguments), position + len(FUNCTION_END)
        if position == len(written):
            raise BadCallError(f"{FUNCTION}{name[:80]}> is never closed with {FUNCTION_END}.")
        if not written.startswith(PARAMETER, position):
            raise BadCallError(f"After a parameter of {name[:80]!r}, expected {PARAMETER}NAME> or {FUNCTION_END}.")
        key, start = _name(written, position + len(PARAMETER), PARAMETER)
        end = written.find(PARAMETER_END, start)
        if end < 0:
            raise BadCallError(f"{PARAMETER}{key[:80]}> is never closed with {PARAMETER_END}.")
        if key in arguments:
            raise BadCallError(f"The parameter {key[:80]!r} is given twice.")
        text = written[start:end].removeprefix("\n").removesuffix("\n")
        arguments[key] = typed(text, argument_types(tools, name, key), key)
        position = end + len(PARAMETER_END)


def _name(written: str, position: int, tag: str) -> tuple[str, int]:
    found = _NAME.match(written, position)
    if found is None or not found[1].strip():
        raise BadCallError(f"{tag} must be followed by a name and a >.")
    return found[1].strip(), found.end()


def _render(call: ToolCall) -> str:
    lines = [TOOL_CALL, f"{FUNCTION}{call.name}>"]
    for key, value in call.arguments.items():
        lines += [f"{PARAMETER}{key}>", value if isinstance(value, str) else to_json(value, _TAGS), PARAMETER_END]
    return "\n".join([*lines, FUNCTION_END, TOOL_CALL_END])
