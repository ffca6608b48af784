"""Hermes and Qwen: `<tool_call>{"name": .., "arguments": {..}}</tool_call>`, several side by side.

The chat template tells of the tools and puts results of the role "tool" into turns; a prompt template does it instead
for models whose chat template knows no tools.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from verl.data.formats.base import Calls, Final, Parsed, ParseError
from verl.data.formats.text import BadCallError, find_spoken, read_json, skip_space, speech_start, to_call, to_json
from verl.data.formats.turns import TurnFormat
from verl.types import ToolCall, ToolSpec
from verl.utils.reward_score.parsing import TOOL_CALL, TOOL_CALL_END


@dataclass(frozen=True)
class HermesFormat(TurnFormat):
    """One JSON object a block."""

    def parse(self, written: str, tools: Sequence[ToolSpec] = ()) -> Parsed:
        """All blocks outside thoughts, or what is wrong with the first that cannot be read."""
        calls: list[ToolCall] = []
        position = speech_start(written, self.in_thought)
        try:
            while (start := find_spoken(written, TOOL_CALL, position)) >= 0:
                call, position = _read(written, start + len(TOOL_CALL))
                calls.append(call)
        except BadCallError as error:
            return ParseError(str(error))
        return Calls(tuple(calls)) if calls else Final()

    def render(self, calls: Sequence[ToolCall]) -> str:
        """A block each."""
        return "\n".join(
            f"{TOOL_CALL}\n{to_json({'name': call.name, 'arguments': call.arguments})}\n{TOOL_CALL_END}"
            for call in calls
        )


def _read(written: str, start: int) -> tuple[ToolCall, int]:
    """(the call of the block that opened before `start`, where the block ends). JSON may quote the closing tag."""
    if written.find(TOOL_CALL_END, start) < 0:
        raise BadCallError(f"{TOOL_CALL} is never closed with {TOOL_CALL_END}.")
    value, end = read_json(written, start)
    end = skip_space(written, end)
    if not written.startswith(TOOL_CALL_END, end):
        raise BadCallError(f"Behind the JSON object of a call must come {TOOL_CALL_END}; write a block for each call.")
    return to_call(value, "arguments"), end + len(TOOL_CALL_END)


# arXiv 2505.01441, function calling
ARTIST_TOOLS = partial(HermesFormat, prompt_template="artist_tools")
