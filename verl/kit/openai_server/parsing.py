"""A response as OpenAI's API has it: content and tool calls, read with the tool-call format of the training."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from verl.formats.base import Calls, Continue, ToolCallFormat
from verl.formats.inline import InlineFormat
from verl.formats.llama3_json import PYTHON_TAG, Llama3JsonFormat
from verl.formats.text import find_spoken, skip_space, speech_start
from verl.formats.toolrl_text import THINK, THINK_END, TOOL_CALL, TOOL_CALL_END
from verl.formats.xml import FUNCTION, FUNCTION_END
from verl.kit.papers.formats.fence import OPENING
from verl.kit.papers.formats.tags import TagsFormat
from verl.types import ToolCall, ToolSpec

PARSER_NAME = "toolrl"  # for vLLM's --tool-call-parser


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
        """The content and calls of a complete response; without calls, or with malformed ones, all is content.

        A format that pauses for its tool runs the first call: what follows was not seen in training.
        """
        written = self._until_pause(text) if self._inline else text
        parsed = self.tool_call_format.parse(written, tools)
        if not isinstance(parsed, Calls):
            return AssistantMessage(text)
        start = written.rfind(OPENING) if self._fenced else self._call_start(written)
        before = written[: max(start, 0)]
        if self._inline:  # exactly as written, because the turn continues after the call
            return AssistantMessage(before, parsed.calls)
        end = max((written.rfind(tag) + len(tag) for tag in self._closing if tag in written), default=len(written))
        return AssistantMessage("\n".join(filter(None, (before.rstrip(), written[end:].strip()))), parsed.calls)

    def certain_content(self, text: str) -> str:
        """The beginning of the content that is certain before the response is complete."""
        if self._mark and not self._mark.startswith("<"):  # a text that content may have, too
            return ""
        text = self._until_pause(text) if self._inline else text
        start = self._call_start(text)
        if start < 0:
            start = len(text) - max(
                (size for tag in self._opening for size in range(1, len(tag)) if text.endswith(tag[:size])), default=0
            )
        return text[:start] if self._inline else text[:start].rstrip()

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings at which the policy pauses, if they do not depend on its text."""
        first = self.tool_call_format.stop_strings("")
        return first if first == self.tool_call_format.stop_strings(f"{OPENING}\n") else ()

    @property
    def _inline(self) -> bool:
        return isinstance(self.tool_call_format, InlineFormat)

    @property
    def _mark(self) -> str | None:
        """With which every call of the native format begins; None for other formats."""
        return getattr(self.tool_call_format, "mark", None)

    @property
    def _fenced(self) -> bool:
        return self._inline and not isinstance(self.tool_call_format, TagsFormat)

    @cached_property
    def _opening(self) -> tuple[str, ...]:
        match self.tool_call_format:
            case TagsFormat() as tags:
                return (f"<{tags.call_tag}>",)
            case InlineFormat():
                return (OPENING,)
            case Llama3JsonFormat():
                return (PYTHON_TAG, THINK)
        return (self._mark,) if self._mark else (TOOL_CALL, FUNCTION)

    @property
    def _closing(self) -> tuple[str, ...]:
        """Empty: calls are the rest of the response."""
        if self._mark:
            end = getattr(self.tool_call_format, "end_mark", "")
            return (end,) if end else ()
        return () if isinstance(self.tool_call_format, Llama3JsonFormat) else (TOOL_CALL_END, FUNCTION_END)

    def _call_start(self, text: str) -> int:
        """Where calls begin, or may begin in a text that continues; -1 if nowhere so far."""
        if isinstance(self.tool_call_format, InlineFormat) and self.tool_call_format.calls_in_thoughts:
            return min((start for tag in self._opening if (start := text.find(tag)) >= 0), default=-1)
        position = speech_start(text, getattr(self.tool_call_format, "in_thought", False))
        if isinstance(self.tool_call_format, Llama3JsonFormat):
            return _json_start(text, position)
        return min((start for tag in self._opening if (start := find_spoken(text, tag, position)) >= 0), default=-1)

    def _until_pause(self, text: str) -> str:
        """The text up to the stop string at which an episode would have run a call, or all of it."""
        end = 0
        while True:
            stops = self.tool_call_format.stop_strings(text[:end])
            ends = [found + len(stop) for stop in stops if (found := text.find(stop, end)) >= 0]
            if not ends:
                return text
            end = min(ends)
            if not isinstance(self.tool_call_format.parse(text[:end]), Continue):
                return text[:end]


def _json_start(text: str, position: int) -> int:
    """Llama's calls are the whole response after a thought."""
    position = skip_space(text, position)
    if text.startswith(THINK, position):
        end = text.find(THINK_END, position)
        if end < 0:
            return -1
        position = skip_space(text, end + len(THINK_END))
    return position if text.startswith((PYTHON_TAG, "{"), position) else -1
