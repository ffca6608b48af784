"""Tool-N1 (arXiv 2505.00024): a thought, then all calls as one JSON list in `<tool_call>`. Meant for single turns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from verl.formats import jinja
from verl.formats.base import Parsed
from verl.formats.prompt import SystemPromptTemplateMixin, tool_lines
from verl.formats.text import only_block, parsed, read_whole_json, to_call, to_json
from verl.formats.toolrl_text import TOOL_CALL, TOOL_CALL_END
from verl.types import Message, ToolCall, ToolSpec


@dataclass(frozen=True)
class ToolN1Format(SystemPromptTemplateMixin):
    """A single object counts as a list of one, and an empty list as no call, as in the paper's reward."""

    needs_thought: ClassVar[bool] = True
    serving_template: ClassVar[str | None] = "system"
    prompt_template: str = "tool_n1"

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str | Sequence[Message]:
        if not tools:
            return tuple(messages)
        return (self.system(messages, tool_lines(tools)), *(each for each in messages if each.role != "system"))

    def parse(self, written: str, tools: Sequence[ToolSpec] = ()) -> Parsed:
        return parsed(_calls(written))

    def render(self, calls: Sequence[ToolCall]) -> str:
        value = [{"name": call.name, "arguments": call.arguments} for call in calls]
        return f"{TOOL_CALL}\n{to_json(value)}\n{TOOL_CALL_END}"

    def calls_jinja(self) -> str:
        calls = jinja.each_call(jinja.call_object("arguments"), between=", ")
        return jinja.around(f"{TOOL_CALL}\n[", calls, f"]\n{TOOL_CALL_END}")


def _calls(written: str) -> Iterator[ToolCall]:
    block = only_block(written)
    if block is not None:
        value = read_whole_json(block)
        yield from (to_call(each, "arguments") for each in (value if isinstance(value, list) else [value]))
