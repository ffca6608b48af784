"""What a response contains, for rewards that compare calls in any tool-call format."""

from verl.formats.base import Calls, Continue, Parsed, ParseError, ToolCallFormat
from verl.formats.split import split
from verl.formats.toolrl_text import THINK, THINK_END
from verl.types import ParsedResponse


def parsed_response(tool_call_format: ToolCallFormat, written: str, parsed: Parsed) -> ParsedResponse:
    """parsed: the result of the format's `parse` for this text"""
    calls = parsed.calls if isinstance(parsed, Calls) else ()
    thinks = THINK_END in written or not getattr(tool_call_format, "needs_thought", False)
    speaks = bool(calls or spoken(written, getattr(tool_call_format, "in_thought", False)).strip())
    complete = thinks and speaks and not isinstance(parsed, Continue)
    content = split(tool_call_format, written).before if calls else ""
    return ParsedResponse(calls, parsed.problem if isinstance(parsed, ParseError) else None, complete, content)


def spoken(written: str, in_thought: bool = False) -> str:
    """The text after the thought at its beginning, if any. in_thought: the prompt opens it"""
    before, end, after = written.partition(THINK_END)
    if end:
        return after
    return "" if in_thought or before.lstrip().startswith(THINK) else written
