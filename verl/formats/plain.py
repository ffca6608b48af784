"""No tool calls: every response is a final answer. The format of runs that set none."""

from collections.abc import Sequence
from typing import ClassVar

from verl.formats.base import Final
from verl.formats.split import Split
from verl.types import Message, ToolCall, ToolSpec


class PlainFormat:
    """Lists tools by the chat template, and leaves the response as it is; an episode has one turn."""

    template_tools: ClassVar[bool] = True
    final_stop_strings: ClassVar[tuple[str, ...]] = ()
    turns_per_call: ClassVar[int] = 0  # so that the limit on calls adds no turns
    parallel_calls: ClassVar[bool] = False

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Sequence[Message]:
        return messages

    def stop_strings(self, written: str) -> tuple[str, ...]:
        return ()

    def parse(self, written: str, tools: Sequence[ToolSpec] = ()) -> Final:
        return Final()

    def observation(self, results: Sequence[Message], written: str) -> Sequence[Message]:
        return ()  # no turn follows

    def split(self, text: str, tools: Sequence[ToolSpec] = ()) -> Split:
        return Split(text)

    def certain_content(self, text: str) -> str:
        return text

    def render(self, calls: Sequence[ToolCall]) -> str:
        return ""


PLAIN = PlainFormat()
