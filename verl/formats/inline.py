"""Formats in which the policy pauses at a stop string and the tool output continues the same turn."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from verl.errors import ConfigError
from verl.formats.base import Calls, Continue, Parsed, ParseError, at_end
from verl.formats.prompt import PromptTemplateMixin
from verl.formats.split import Split, content_before, split_by_parsing
from verl.formats.text import without_thoughts
from verl.types import Message, ToolCall, ToolSpec


@dataclass(frozen=True)
class InlineFormat(PromptTemplateMixin, ABC):
    """Base class of inline formats. The policy's text becomes the single argument of a single tool.

    calls_in_thoughts: a call is run wherever it is written, as the published codes do; False: not inside thoughts
    raw: the filled-in prompt template is the whole prompt, without a chat template and without the other messages
    tool, argument: names of the tool and its argument
    last_line_of_errors: show only the last line of outputs that contain "Error"
    empty: replacement for an empty output
    """

    parallel_calls: ClassVar[bool] = False
    serving_template: ClassVar[str | None] = "inline"
    template_tools: ClassVar[bool] = False  # the recipe's prompt describes the tool
    calls_in_thoughts: bool = True
    raw: bool = False
    tool: str = "python"
    argument: str = "code"
    last_line_of_errors: bool = False
    empty: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.raw and self.prompt is None:
            raise ConfigError("raw=true skips the chat template, so prompt_template must name a prompt text")

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str | Sequence[Message]:
        return self.render_raw_prompt(messages, tools) if self.raw else super().render_prompt(messages, tools)

    def parse(self, written: str, tools: Sequence[ToolSpec] = ()) -> Parsed:
        text = written if self.calls_in_thoughts else without_thoughts(written)
        parsed = self.read(text)
        if self.paused(written) and not self.paused(text):  # a pause inside a thought
            meant = at_end(parsed)
            return meant if isinstance(meant, Calls) else Continue(meant)
        return parsed

    @abstractmethod
    def read(self, written: str) -> Parsed:
        """The call in the text, if any, by the rule of the published code."""

    @property
    def one_text(self) -> bool:
        """Whether a response without an action is continued. A raw prompt has no turns."""
        return self.raw

    @abstractmethod
    def delimiters(self, written: str) -> tuple[str, str]:
        """The recipe's texts before and after a tool output."""

    def wrap(self, output: str, written: str) -> str:
        opening, closing = self.delimiters(written)
        return f"{opening}{output}{closing}"

    def paused(self, written: str) -> bool:
        """Whether the policy paused for an answer, rather than ending its turn."""
        return written.rstrip().endswith(self.stop_strings(written))

    def call(self, text: str) -> ToolCall:
        return ToolCall(self.tool, {self.argument: text})

    def observation(self, results: Sequence[Message], written: str) -> str | Sequence[Message]:
        """The outputs, as `shown` and cut, in the recipe's delimiters, or the parse error without them.

        If the policy ended its turn instead of pausing, the answer is a separate turn, unless the episode is
        `one_text`; so is a message that is not from a tool, unless the prompt is raw.
        """
        continued = self.one_text or self.paused(written)
        if not self.raw and not (continued and all(each.role == "tool" for each in results)):
            return tuple(Message("user" if each.role == "tool" else each.role, each.content) for each in results)
        if isinstance(at_end(self.parse(written)), ParseError):
            return "".join(f"\n{each.content}\n" for each in results)
        return self.wrap("\n".join(each.content for each in results), written)

    @property
    def instruction_tags(self) -> tuple[str, ...]:
        """A question with all of these already has the recipe's instructions; none: they are always added."""
        return ()

    @property
    def single_tool(self) -> tuple[str, str]:
        """(name, argument) of the tool that every call means"""
        return self.tool, self.argument

    @property
    def fixed_stop_strings(self) -> tuple[str, ...]:
        """The stop strings, if they do not depend on the policy's text; else none."""
        return self.stop_strings("")

    @property
    def trial_calls(self) -> tuple[ToolCall, ToolCall]:
        return self.call("1"), self.call("2")

    def split(self, text: str, tools: Sequence[ToolSpec] = ()) -> Split:
        """The first call, which is run at once: what follows was not seen in training. The text before it is as it was
        written, because the turn continues after the call."""
        found = split_by_parsing(self.parse, self._until_pause(text))
        return replace(found, after="") if found.calls else Split(text)

    def certain_content(self, text: str) -> str:
        """Up to the first opening tag, wherever it is."""
        text = self._until_pause(text)
        found = [start for tag in self.openings if (start := text.find(tag)) >= 0]
        return content_before(text, min(found, default=-1), self.openings)

    def _until_pause(self, text: str) -> str:
        """The text up to the stop string at which an episode would have run a call, or all of it."""
        end = 0
        while True:
            stops = self.stop_strings(text[:end])
            ends = [found + len(stop) for stop in stops if (found := text.find(stop, end)) >= 0]
            if not ends:
                return text
            end = min(ends)
            if not isinstance(self.parse(text[:end]), Continue):
                return text[:end]

    def shown(self, output: str) -> str:
        text = output.strip("\n")
        if not text.strip():
            return self.empty
        if self.last_line_of_errors and "Error" in text:
            return text.rstrip().rpartition("\n")[2]
        return text
