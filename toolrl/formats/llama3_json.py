"""Llama 3.1: the whole response is a call, `{"name": .., "parameters": {..}}`, or several separated by semicolons."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl.formats import jinja
from verl.formats.base import Calls, Final, Parsed, ParseError
from verl.formats.prompt import TurnFormat
from verl.formats.split import Split, content_before
from verl.formats.text import BadCallError, parse_json, skip_space, speech_start, to_call, to_json
from verl.formats.toolrl_text import THINK, THINK_END
from verl.types import Message, ToolCall, ToolSpec

PYTHON_TAG = "<|python_tag|>"
_CALL_KEYS = ('"name"', '"parameters"')


@dataclass(frozen=True)
class Llama3JsonFormat(TurnFormat):
    """A response with JSON that is not a call is an answer, unless the python tag announces a call."""

    def parse(self, written: str, tools: Sequence[ToolSpec] = ()) -> Parsed:
        text = written[speech_start(written, self.in_thought) :].strip()
        if text.startswith(THINK):
            text = text.partition(THINK_END)[2].strip()
        announced = text.startswith(PYTHON_TAG)
        text = text.removeprefix(PYTHON_TAG)
        if not announced and not text.startswith("{"):
            return Final()
        meant = announced or text.startswith(_CALL_KEYS, skip_space(text, 1))
        try:
            values = _values(text)
            if not announced and not any(map(_means_a_call, values)):
                return Final()
            meant = True
            return Calls(tuple(to_call(value, "parameters") for value in values))
        except BadCallError as error:
            return ParseError(str(error)) if meant else Final()

    def split(self, text: str, tools: Sequence[ToolSpec] = ()) -> Split:
        """The calls are the whole response after a thought."""
        parsed = self.parse(text, tools)
        if not isinstance(parsed, Calls):
            return Split(text)
        return Split(self.certain_content(text), parsed.calls)

    def certain_content(self, text: str) -> str:
        position = skip_space(text, speech_start(text, self.in_thought))
        if text.startswith(THINK, position):
            end = text.find(THINK_END, position)
            position = len(text) if end < 0 else skip_space(text, end + len(THINK_END))
        starts = position if text.startswith((PYTHON_TAG, "{"), position) else -1
        return content_before(text, starts, (PYTHON_TAG, THINK)).rstrip()

    def observation(self, results: Sequence[Message], written: str) -> str | Sequence[Message]:
        return tuple(replace(each, role="ipython") if each.role == "tool" else each for each in results)

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "; ".join(
            to_json({"name": call.name, "parameters": call.arguments}, (THINK, THINK_END)) for call in calls
        )

    def calls_jinja(self) -> str:
        return jinja.each_call(jinja.call_object("parameters", (THINK, THINK_END)), between="; ")


def _means_a_call(value: Any) -> bool:
    """Whether an object has a key that only calls have, or only keys of calls."""
    if not isinstance(value, dict):
        return False
    return "parameters" in value or ("name" in value and value.keys() <= {"name", "type", "arguments"})


def _values(text: str) -> list[Any]:
    values: list[Any] = []
    position = 0
    while True:
        value, position = parse_json(text, position)
        values.append(value)
        position = skip_space(text, position)
        if position < len(text) and text[position] != ";":
            raise BadCallError("A response that calls tools must contain only the JSON of calls, separated by ;.")
        position = skip_space(text, position + 1)
        if position >= len(text):
            return values
