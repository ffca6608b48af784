"""Formats in which the policy pauses at a stop string, and the answer goes on in its own turn."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from verl.data.formats.base import Parsed, ParseError
from verl.data.formats.prompt import PromptTemplateMixin
from verl.data.formats.text import shorten
from verl.errors import ConfigError
from verl.types import Message, ToolCall, ToolSpec


@dataclass(frozen=True)
class InlineFormat(PromptTemplateMixin, ABC):
    """What such formats share. The policy's text becomes the one argument of the one tool.

    raw: the filled-in prompt template is the whole prompt, without a chat template and without the other messages
    tool, argument: the name of the tool, and of its argument
    limit: outputs of so many characters or more lose their middle; 0: none do
    too_long: what is shown of such outputs instead, where it is not empty
    last_line_of_errors: an output with the word "Error" is shown by its last line alone
    empty: what is shown of an output without any text
    """

    parallel_calls: ClassVar[bool] = False
    raw: bool = False
    tool: str = "python"
    argument: str = "code"
    limit: int = 0
    too_long: str = ""
    last_line_of_errors: bool = False
    empty: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.raw and self.prompt is None:
            raise ConfigError("raw=true leaves out the chat template, so prompt_template must name a text to use")

    @property
    def template_tools(self) -> bool:
        """The recipe's prompt tells of the tool."""
        return False

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str | Sequence[Message]:
        """See verl.data.formats.base.Format."""
        return self.render_raw_prompt(messages, tools) if self.raw else super().render_prompt(messages, tools)

    @abstractmethod
    def stop_strings(self, written: str) -> tuple[str, ...]:
        """Where the policy pauses."""

    @abstractmethod
    def parse(self, written: str, tools: Sequence[ToolSpec] = ()) -> Parsed:
        """What it asks for."""

    @abstractmethod
    def wrap(self, output: str, written: str) -> str:
        """An output that is to be shown as it is, in the recipe's marks."""

    def paused(self, written: str) -> bool:
        """Whether the policy stopped where it waits for an answer, rather than that it ended its turn."""
        return written.rstrip().endswith(self.stop_strings(written))

    def call(self, text: str) -> ToolCall:
        """The call that a policy's text stands for."""
        return ToolCall(self.tool, {self.argument: text})

    def observation(self, results: Sequence[Message], written: str) -> str | Sequence[Message]:
        """The outputs, in the recipe's marks, or what was wrong with the call, without them.

        Where the policy ended its turn instead of pausing, and where somebody else than a tool speaks, the answer is
        a turn of its own; a raw prompt knows no turns, so all goes on in one text.
        """
        if not self.raw and not (self.paused(written) and all(each.role == "tool" for each in results)):
            return tuple(Message("user" if each.role == "tool" else each.role, each.content) for each in results)
        if isinstance(self.parse(written), ParseError):
            return "".join(f"\n{each.content}\n" for each in results)
        return self.wrap("\n".join(self.shown(each.content) for each in results), written)

    def shown(self, output: str) -> str:
        """As much of an output as the policy gets to see."""
        text = output.strip("\n")
        if not text.strip():
            return self.empty
        if self.last_line_of_errors and "Error" in text:
            text = text.rstrip().rpartition("\n")[2]
        if not self.limit or len(text) < self.limit:
            return text
        return self.too_long or shorten(text, self.limit)
