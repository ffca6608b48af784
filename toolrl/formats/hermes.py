"""Hermes and Qwen: `<tool_call>{"name": .., "arguments": {..}}</tool_call>`, with parallel calls.

The chat template lists the tools and renders results with the role "tool"; for models whose chat template does not
support tools, a prompt template lists them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from verl.formats import jinja
from verl.formats.base import Parsed
from verl.formats.prompt import TurnFormat
from verl.formats.text import BadCallError, each_call, parse_json, parsed, skip_space, speech_start, to_call, to_json
from verl.formats.toolrl_text import TOOL_CALL, TOOL_CALL_END
from verl.types import ToolCall, ToolSpec


@dataclass(frozen=True)
class HermesFormat(TurnFormat):
    """One JSON object per block."""

    def parse(self, written: str, tools: Sequence[ToolSpec] = ()) -> Parsed:
        return parsed(each_call(written, TOOL_CALL, speech_start(written, self.in_thought), _read))

    def render(self, calls: Sequence[ToolCall]) -> str:
        values = [to_json({"name": call.name, "arguments": call.arguments}) for call in calls]
        return "\n".join(f"{TOOL_CALL}\n{value}\n{TOOL_CALL_END}" for value in values)

    def calls_jinja(self) -> str:
        return jinja.each_call(jinja.call_object("arguments"), f"{TOOL_CALL}\n", f"\n{TOOL_CALL_END}")


def _read(written: str, start: int) -> tuple[ToolCall, int]:
    """(the call of the block opened before `start`, end of the block). The JSON may contain the closing tag."""
    if written.find(TOOL_CALL_END, start) < 0:
        raise BadCallError(f"{TOOL_CALL} is never closed with {TOOL_CALL_END}.")
    value, end = parse_json(written, start)
    end = skip_space(written, end)
    if not written.startswith(TOOL_CALL_END, end):
        raise BadCallError(f"The JSON object of a call must be followed by {TOOL_CALL_END}; write one block per call.")
    return to_call(value, "arguments"), end + len(TOOL_CALL_END)


# arXiv 2505.01441, function calling
ARTIST_TOOLS = partial(HermesFormat, prompt_template="artist_tools")
