"""Splits a response into calls and the text around them, as servers and agents need it, by the format's own parser."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verl.formats.base import Calls, Parsed, ToolCallFormat
from verl.formats.toolrl_text import THINK_END
from verl.types import ToolCall, ToolSpec


@dataclass(frozen=True, slots=True)
class Split:
    """A response: the text before its calls, the calls, the text after them. Without calls all is `before`."""

    before: str
    calls: tuple[ToolCall, ...] = ()
    after: str = ""

    def stripped(self) -> "Split":
        """Without the white space next to the calls."""
        return Split(self.before.rstrip(), self.calls, self.after.strip()) if self.calls else self


def split(tool_call_format: ToolCallFormat, text: str, tools: Sequence[ToolSpec] = ()) -> Split:
    """A complete response, split by the format's `split` if it has one."""
    own: Callable[[str, Sequence[ToolSpec]], Split] | None = getattr(tool_call_format, "split", None)
    return (
        own(text, tools) if own else split_by_parsing(lambda each: tool_call_format.parse(each, tools), text).stripped()
    )


def split_by_parsing(parse: Callable[[str], Parsed], text: str) -> Split:
    """The calls are the smallest part of the text that is parsed to the same calls.

    Parses the text about twice as often as its length has bits.
    """
    parsed = parse(text)
    if not isinstance(parsed, Calls):
        return Split(text)
    end = bisect_left(range(len(text)), True, key=lambda end: parse(text[:end]) == parsed)
    # a thought that begins before the part has ended there
    start = bisect_left(range(1, end), True, key=lambda start: parse(f"{THINK_END}\n{text[start:end]}") != parsed)
    return Split(text[:start], parsed.calls, text[end:])


def content_before(text: str, start: int, openings: Sequence[str]) -> str:
    """The text before calls that begin at `start`, or may begin with the last characters; start: -1 if nowhere yet"""
    if start < 0:
        started = (size for tag in openings for size in range(1, len(tag)) if text.endswith(tag[:size]))
        start = len(text) - max(started, default=0)
    return text[:start]
