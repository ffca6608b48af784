"""A response as OpenAI's API has it: content and tool calls, read with the tool-call format of the training."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from verl.formats.base import ToolCallFormat
from verl.formats.split import split
from verl.types import ToolCall, ToolSpec

PARSER_NAME = "toolrl"  # value of vLLM's --tool-call-parser
_ID = re.compile(r"\bcall(\d{5,})\b")


def numbered(calls: Sequence[ToolCall], first: int) -> tuple[ToolCall, ...]:
    """The calls with an id each: nine letters and digits, which all chat templates accept.

    Some programs show them to the policy, so they look alike in training and from a server.
    """
    return tuple(replace(call, id=f"call{first + number:05}") for number, call in enumerate(calls))


def next_number(conversation: str) -> int:
    """The number after those of all ids in a conversation."""
    return max((int(number) + 1 for number in _ID.findall(conversation)), default=0)


@dataclass(frozen=True, slots=True)
class AssistantMessage:
    """content: the text around the calls"""

    content: str
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class ResponseReader:
    """Splits responses of one tool-call format."""

    tool_call_format: ToolCallFormat

    def read(self, text: str, tools: Sequence[ToolSpec] = ()) -> AssistantMessage:
        """The content and calls of a complete response; without calls, or with malformed ones, all is content."""
        parts = split(self.tool_call_format, text, tools)
        return AssistantMessage("\n".join(filter(None, (parts.before, parts.after))), parts.calls)

    def certain_content(self, text: str) -> str:
        """The beginning of the content that is certain before the response is complete."""
        certain = getattr(self.tool_call_format, "certain_content", None)
        return certain(text) if certain else ""

    @property
    def single_tool(self) -> tuple[str, str] | None:
        """(name, argument) of the one tool that can be called, for formats whose calls name none"""
        tags: tuple[str, str] | None = getattr(self.tool_call_format, "single_tool", None)
        return tags

    @property
    def tags(self) -> tuple[str, ...]:
        """Texts of the format that may be special tokens, as far as they are known."""
        return (*getattr(self.tool_call_format, "openings", ()), *self.stop_strings)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings at which the policy pauses, if they do not depend on its text."""
        fixed: tuple[str, ...] = getattr(
            self.tool_call_format, "fixed_stop_strings", self.tool_call_format.stop_strings("")
        )
        return fixed
