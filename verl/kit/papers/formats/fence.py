"""Python in Markdown fences, executed as it is written; the output gets its own fence.

ToRL (arXiv 2503.23383) lets the policy open the output fence and pauses there. ZeroTIR (Agent RL Scaling Law,
arXiv 2505.07773) pauses twice: where the code fence opens, and where it closes.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from verl.formats import jinja
from verl.formats.base import Calls, Continue, Final, Parsed
from verl.formats.inline import InlineFormat
from verl.formats.text import find_spoken, speech_start
from verl.types import ToolCall, ToolSpec

OPENING, CLOSING, OUTPUT = "```python", "```", "```output"
_CLOSING_LINE = re.compile(r"^[ \t]*```[ \t]*$", re.MULTILINE)
_CLOSING_ANYWHERE = re.compile(re.escape(CLOSING))


@dataclass(frozen=True)
class _Code:
    """A block of code outside thoughts; `end`: end of its closing fence, None if it is still open."""

    text: str
    end: int | None


def _blocks(written: str, closing: re.Pattern[str]) -> list[_Code]:
    found: list[_Code] = []
    position = speech_start(written)
    while (start := find_spoken(written, OPENING, position)) >= 0:
        start += len(OPENING)
        fence = closing.search(written, start)
        if fence is None:
            return [*found, _Code(written[start:], None)]
        position = fence.end()
        text = written[start : fence.start()].rpartition(f"\n{OPENING}\n")[2]  # a second opening restarts the block
        found.append(_Code(text.strip("\n"), position))
    return found


@dataclass(frozen=True)
class FenceFormat(InlineFormat):
    """ToRL: at ```` ```output ```` the last complete block since the last output is run.

    empty: as in its published code, which treats an empty output as a timeout
    """

    prompt_template: str | None = "torl"
    raw: bool = True
    last_line_of_errors: bool = True
    empty: str = "timeout_decorator.timeout_decorator.TimeoutError: 'Timed Out'"

    def stop_strings(self, written: str) -> tuple[str, ...]:
        return (OUTPUT,)

    def parse(self, written: str, tools: Sequence[ToolSpec] = ()) -> Parsed:
        """A fence closes on its own line; without a complete block, generation continues."""
        if not written.rstrip().endswith(OUTPUT):
            return Final()
        complete = [block for block in _blocks(written, _CLOSING_LINE) if block.end is not None and block.text.strip()]
        return Calls((self.call(complete[-1].text),)) if complete else Continue()

    def wrap(self, output: str, written: str) -> str:
        return f"{'' if written.endswith(chr(10)) else chr(10)}{output}\n{CLOSING}\n"

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(f"{OPENING}\n{call.arguments[self.argument]}\n{CLOSING}\n{OUTPUT}" for call in calls)

    def calls_jinja(self) -> str:
        return jinja.each_call(jinja.argument(self.argument), f"{OPENING}\n", f"\n{CLOSING}\n{OUTPUT}")


@dataclass(frozen=True)
class ZeroTirFormat(InlineFormat):
    """ZeroTIR: code is run as soon as its fence closes, anywhere on a line.

    A call takes two turns: one up to the opening fence, one inside it. Its published code counts stops the same way.
    """

    turns_per_call: ClassVar[int] = 2
    prompt_template: str | None = "zerotir"
    raw: bool = True
    empty: str = "(no output)"

    def stop_strings(self, written: str) -> tuple[str, ...]:
        blocks = _blocks(written, _CLOSING_ANYWHERE)
        return (CLOSING,) if blocks and blocks[-1].end is None else (OPENING,)

    @property
    def fixed_stop_strings(self) -> tuple[str, ...]:
        return ()

    def paused(self, written: str) -> bool:
        """At either fence; after a closing one, `stop_strings` is already the opening one."""
        return written.rstrip().endswith((OPENING, CLOSING))

    def parse(self, written: str, tools: Sequence[ToolSpec] = ()) -> Parsed:
        """Runs a block that ends the text; after an opening fence, generation continues."""
        ended = written.rstrip()
        if ended.endswith(OPENING):
            return Continue()
        blocks = _blocks(written, _CLOSING_ANYWHERE)
        if not blocks or blocks[-1].end is None or blocks[-1].end < len(ended):
            return Final()
        return Calls((self.call(blocks[-1].text),)) if blocks[-1].text.strip() else Continue()

    def wrap(self, output: str, written: str) -> str:
        return f"{'' if written.endswith(chr(10)) else chr(10)}{OUTPUT}\n{output}\n{CLOSING}\n\n\n"

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(f"{OPENING}\n{call.arguments[self.argument]}\n{CLOSING}" for call in calls)

    def calls_jinja(self) -> str:
        return jinja.each_call(jinja.argument(self.argument), f"{OPENING}\n", f"\n{CLOSING}")
