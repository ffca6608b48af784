"""What a response contains, for rewards that compare calls in any tool-call format."""

from verl.formats.base import Calls, Continue, Parsed, ParseError, ToolCallFormat
from verl.formats.toolrl_text import THINK, THINK_END
from verl.types import ParsedResponse


def parsed_response(tool_call_format: ToolCallFormat, written: str, parsed: Parsed) -> ParsedResponse:
    """parsed: the result of the format's `parse` for this text"""
    calls = parsed.calls if isinstance(parsed, Calls) else ()
    before, thought_end, after = written.partition(THINK_END)
    in_thought = getattr(tool_call_format, "in_thought", False) or before.lstrip().startswith(THINK)
    spoken = after if thought_end else "" if in_thought else written
    thinks = bool(thought_end) or not getattr(tool_call_format, "needs_thought", False)
    complete = thinks and not isinstance(parsed, Continue) and bool(calls or spoken.strip())
    return ParsedResponse(calls, parsed.problem if isinstance(parsed, ParseError) else None, complete)
