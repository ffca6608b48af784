"""Llama 3.1: the whole response is a call, `{"name": .., "parameters": {..}}`, or several with semicolons between
them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl.data.formats.base import Calls, Final, Parsed, ParseError
from verl.data.formats.text import BadCallError, read_json, skip_space, speech_start, to_call, to_json
from verl.data.formats.turns import TurnFormat
from verl.types import Message, ToolCall, ToolSpec
from verl.utils.reward_score.parsing import THINK, THINK_END

PYTHON_TAG = "<|python_tag|>"
_CALL_KEYS = ('"name"', '"parameters"')


@dataclass(frozen=True)
class Llama3JsonFormat(TurnFormat):
    """A response that is JSON but of no call is an answer, unless the python tag announces a call."""

    def parse(self, written: str, tools: Sequence[ToolSpec] = ()) -> Parsed:
        """The calls that the response is, thoughts before them left out."""
        said = written[speech_start(written, self.in_thought) :].strip()
        if said.startswith(THINK):
            said = said.partition(THINK_END)[2].strip()
        announced = said.startswith(PYTHON_TAG)
        said = said.removeprefix(PYTHON_TAG)
        if not announced and not said.startswith("{"):
            return Final()
        meant = announced or said.startswith(_CALL_KEYS, skip_space(said, 1))
        try:
            values = _values(said)
            if not announced and not any(map(_means_a_call, values)):
                return Final()
            meant = True
            return Calls(tuple(to_call(value, "parameters") for value in values))
        except BadCallError as error:
            return ParseError(str(error)) if meant else Final()

    def observation(self, results: Sequence[Message], written: str) -> str | Sequence[Message]:
        """Results are of the role that Llama's template has for them."""
        return tuple(replace(each, role="ipython") if each.role == "tool" else each for each in results)

    def render(self, calls: Sequence[ToolCall]) -> str:
        """The calls, a semicolon between them."""
        return "; ".join(
            to_json({"name": call.name, "parameters": call.arguments}, (THINK, THINK_END)) for call in calls
        )


def _means_a_call(value: Any) -> bool:
    """Whether an object has what only calls have, or nothing but what calls have."""
    if not isinstance(value, dict):
        return False
    return "parameters" in value or ("name" in value and value.keys() <= {"name", "type", "arguments"})


def _values(said: str) -> list[Any]:
    values: list[Any] = []
    position = 0
    while True:
        value, position = read_json(said, position)
        values.append(value)
        position = skip_space(said, position)
        if position < len(said) and said[position] != ";":
            raise BadCallError("A reply that calls tools is nothing but the JSON of calls, with ; between them.")
        position = skip_space(said, position + 1)
        if position >= len(said):
            return values
