"""Python in Markdown fences, executed as it is written; the output gets its own fence.

ToRL (arXiv 2503.23383) lets the policy open the output fence and pauses there. ZeroTIR (Agent RL Scaling Law,
arXiv 2505.07773) pauses twice: where the code fence opens, and where it closes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from verl.formats import jinja
from verl.formats.base import Calls, Continue, Final, Parsed
from verl.formats.inline import InlineFormat
from verl.formats.text import without_thoughts
from verl.types import ToolCall

OPENING, CLOSING, OUTPUT = "```python", "```", "```output"


@dataclass(frozen=True)
class FenceFormat(InlineFormat):
    """ToRL: at ```` ```output ```` the last block since the pause before is run, if it is complete.

    empty: as in its published code, which treats an empty output as a timeout
    """

    prompt_template: str | None = "torl"
    raw: bool = True
    last_line_of_errors: bool = True
    empty: str = "timeout_decorator.timeout_decorator.TimeoutError: 'Timed Out'"

    def stop_strings(self, written: str) -> tuple[str, ...]:
        return (OUTPUT,)

    def read(self, written: str) -> Parsed:
        """Line by line: a line that begins or ends with an opening fence begins a block, the next one that begins with
        any fence ends it. Without a complete block, generation continues."""
        ended = written.rstrip()
        if not ended.endswith(OUTPUT):
            return Final()
        code: list[str] = []
        is_open = False
        for line in ended.removesuffix(OUTPUT).rpartition(OUTPUT)[2].split("\n"):
            if line.startswith(OPENING) or line.endswith(OPENING):
                code, is_open = [], True
            elif line.startswith(CLOSING):
                is_open = False
            elif is_open:
                code.append(line)
        return Continue() if is_open or not code else Calls((self.call("\n".join(code)),))

    def delimiters(self, written: str) -> tuple[str, str]:
        return "" if written.endswith("\n") else "\n", f"\n{CLOSING}\n"

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(f"{OPENING}\n{call.arguments[self.argument]}\n{CLOSING}\n{OUTPUT}" for call in calls)

    def calls_jinja(self) -> str:
        return jinja.each_call(jinja.argument(self.argument), f"{OPENING}\n", f"\n{CLOSING}\n{OUTPUT}")


def _last_block(written: str) -> tuple[str, int | None] | None:
    """(text of the last block, end of its closing fence or None if it is open), or None without a block."""
    block, position = None, 0
    while (start := written.find(OPENING, position)) >= 0:
        start += len(OPENING)
        end = written.find(CLOSING, start)
        if end < 0:
            return written[start:], None
        position = end + len(CLOSING)
        block = written[start:end], position
    return block


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
        block = _last_block(written if self.calls_in_thoughts else without_thoughts(written))
        return (CLOSING,) if block is not None and block[1] is None else (OPENING,)

    @property
    def fixed_stop_strings(self) -> tuple[str, ...]:
        return ()

    def paused(self, written: str) -> bool:
        """At either fence; after a closing one, `stop_strings` is already the opening one."""
        return written.rstrip().endswith((OPENING, CLOSING))

    def read(self, written: str) -> Parsed:
        """Runs a block that ends the text; after an opening fence, generation continues."""
        ended = written.rstrip()
        if ended.endswith(OPENING):
            return Continue()
        block = _last_block(ended)
        if block is None or block[1] != len(ended):
            return Final()
        code = block[0].strip()
        return Calls((self.call(code),)) if code else Continue()

    def delimiters(self, written: str) -> tuple[str, str]:
        return f"{'' if written.endswith(chr(10)) else chr(10)}{OUTPUT}\n", f"\n{CLOSING}\n\n\n"

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(f"{OPENING}\n{call.arguments[self.argument]}\n{CLOSING}" for call in calls)

    def calls_jinja(self) -> str:
        return jinja.each_call(jinja.argument(self.argument), f"{OPENING}\n", f"\n{CLOSING}")
