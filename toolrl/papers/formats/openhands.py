"""OpenHands without native function calling, as SkyRL-v0 trains: functions in the system message, one call a message.

    <function=NAME>
    <parameter=ARGUMENT>value</parameter>
    </function>

A call is read as by OpenHands' `fn_call_converter.py`, in a thought or not, and its result is a message of the user.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from toolrl.formats.typed import argument_types
from toolrl.formats.xml import FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END
from verl.formats.base import Parsed
from verl.formats.prompt import SystemPromptTemplateMixin
from verl.formats.split import Split, content_before, split_by_parsing
from verl.formats.text import BadCallError, parsed, read_whole_json
from verl.types import Message, ToolCall, ToolSpec


@dataclass(frozen=True)
class OpenHandsFormat(SystemPromptTemplateMixin):
    """The first complete function is the call. A single unclosed one counts as closed at the end of the message.

    Values are stripped. Integers and arrays are converted, everything else is text.
    """

    parallel_calls: ClassVar[bool] = False
    serving_template: ClassVar[str | None] = None  # no template can write its list of functions
    prompt_template: str = "openhands"

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Sequence[Message]:
        if not tools:
            return tuple(messages)
        assert self.prompt is not None
        contents = [message.content for message in messages if message.role == "system"]
        system = "\n\n".join(contents) + self.prompt.fill("", function_list(tools))
        return (Message("system", system), *(each for each in messages if each.role != "system"))

    def parse(self, written: str, tools: Sequence[ToolSpec] = ()) -> Parsed:
        if written.count(FUNCTION) == 1:
            written = f"{written}function>" if written.endswith("</") else f"{written}\n{FUNCTION_END}"
        call = _first(written, FUNCTION, FUNCTION_END, "\n")
        return parsed(_calls(call, tools))

    def split(self, text: str, tools: Sequence[ToolSpec] = ()) -> Split:
        """A parsed call may lack its closing tag."""
        parts = split_by_parsing(lambda each: self.parse(each, tools), text).stripped()
        return replace(parts, after=parts.after.removeprefix(FUNCTION_END).lstrip())

    def certain_content(self, text: str) -> str:
        """The text before the first tag that begins a call, in a thought or not."""
        return content_before(text, text.find(FUNCTION), (FUNCTION,)).rstrip()

    def observation(self, results: Sequence[Message], written: str) -> Sequence[Message]:
        return tuple(
            Message("user", f"EXECUTION RESULT of [{each.tool}]:\n{each.content}" if each.tool else each.content)
            for each in results
        )

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(map(_render, calls))


def function_list(tools: Sequence[ToolSpec]) -> str:
    """OpenHands' list: a block for each function, with its parameters in numbered lines."""
    return "\n".join(_describe(number, tool) for number, tool in enumerate(tools, 1))


def _describe(number: int, tool: ToolSpec) -> str:
    lines = [f"---- BEGIN FUNCTION #{number}: {tool.name} ----", f"Description: {tool.description}"]
    properties = tool.parameters.get("properties") or {}
    lines.append("Parameters:" if properties else "No parameters are required for this function.")
    for place, (name, schema) in enumerate(properties.items(), 1):
        status = "required" if name in tool.parameters.get("required", ()) else "optional"
        kind = next(iter(sorted(argument_types([tool], tool.name, name) - {"null"})), "string")
        lines.append(f"  ({place}) {name} ({kind}, {status}): {schema.get('description', '')}")
        if "enum" in schema:
            lines.append(f"Allowed values: [{', '.join(f'`{value}`' for value in schema['enum'])}]")
    return "\n".join([*lines, f"---- END FUNCTION #{number} ----", ""])


def _calls(call: tuple[str, str, int] | None, tools: Sequence[ToolSpec]) -> Iterator[ToolCall]:
    if call is None:
        return
    name, body, _ = call
    arguments: dict[str, Any] = {}
    position = 0
    while (call := _first(body, PARAMETER, PARAMETER_END, "", position)) is not None:
        key, value, position = call
        arguments[key] = _convert(value.strip(), key, argument_types(tools, name, key))
    yield ToolCall(name, arguments)


def _convert(text: str, name: str, types: frozenset[str]) -> Any:
    if "integer" in types:
        try:
            return int(text)
        except ValueError as error:
            raise BadCallError(f"The parameter {name[:80]!r} must be an integer.") from error
    return read_whole_json(text) if "array" in types else text


def _first(text: str, opening: str, closing: str, after_name: str, position: int = 0) -> tuple[str, str, int] | None:
    """(name, text inside, end) of the first complete block `OPENING name>` + after_name .. closing"""
    name_end = -1
    while (start := text.find(opening, position)) >= 0:
        start += len(opening)
        if name_end <= start:  # else the same `>` ends the names of several openings
            name_end = text.find(">", start)
        inside = name_end + 1 + len(after_name)
        if name_end > start and text.startswith(after_name, name_end + 1):
            end = text.find(closing, inside)
            return None if end < 0 else (text[start:name_end], text[inside:end], end + len(closing))
        if name_end < 0:
            return None
        position = start
    return None


def _render(call: ToolCall) -> str:
    lines = [f"{FUNCTION}{call.name}>"]
    for key, value in call.arguments.items():
        around = "\n" if isinstance(value, str) and "\n" in value else ""
        lines.append(f"{PARAMETER}{key}>{around}{value}{around}{PARAMETER_END}")
    return "\n".join([*lines, FUNCTION_END])
