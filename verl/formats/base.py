"""The tool-call format interface: how tools are listed, calls parsed, stop strings set and tool results rendered.

`ToolCallFormat.parse` is the tool-call parser; each format has one.

Formats handle text only; the framework tokenizes what a format returns, once, and appends it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from verl import plugins
from verl.errors import ConfigError
from verl.registry import check_options, resolve
from verl.types import Message, ToolCall, ToolSpec

if TYPE_CHECKING:
    from verl.formats.split import Split

TOOL_CALL_FORMATS: Mapping[str, str] = {
    "native": "verl.chat.native:NativeFormat",
    "toolrl": "verl.formats.toolrl:ToolRlFormat",
    **plugins.TOOL_CALL_FORMATS,
}


_OPTIONAL = ("render", "split", "certain_content")  # methods of a format


@dataclass(frozen=True, slots=True)
class Calls:
    """The policy makes these calls in parallel."""

    calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True)
class ParseError:
    """The policy attempted a tool call that cannot be parsed."""

    problem: str  # message for the policy


@dataclass(frozen=True, slots=True)
class Final:
    """The response is the final answer."""


@dataclass(frozen=True, slots=True)
class Continue:
    """The policy paused at a stop string without a call yet: generation continues.

    at_end: what the text means if the policy ends its turn there
    """

    at_end: ParseError | Final = Final()


Parsed = Calls | ParseError | Continue | Final


def at_end(parsed: Parsed) -> Calls | ParseError | Final:
    """What a parsed text means if the policy ends its turn there."""
    return parsed.at_end if isinstance(parsed, Continue) else parsed


class ToolCallFormat(Protocol):
    """A tool-call format. Stateless and deterministic; never raises an exception because of a policy's text.

    Optional attributes: needs_thought (it demands a thought before calls and answers), in_thought (the prompt opens
    it), one_text (a response without an action goes on, without its end token, rather than being answered in a turn),
    shown (a method: what of a tool's output is shown, before it is cut to its limits)
    """

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str | Sequence[Message]:
        """The prompt: messages for the model's chat template, or a plain text for recipes without one."""

    @property
    def template_tools(self) -> bool:
        """Whether the chat template lists the tools (`tools=`) instead of `render_prompt`."""

    def stop_strings(self, written: str) -> tuple[str, ...]:
        """Stop strings in addition to the end token. `written`: the policy's text since the last observation."""

    @property
    def final_stop_strings(self) -> tuple[str, ...]:
        """Stop strings of the last assistant turn, in which tools are disabled: the end of an answer in this format."""

    @property
    def turns_per_call(self) -> int:
        """Assistant turns per call: the number of pauses until the call is run."""

    @property
    def parallel_calls(self) -> bool:
        """Whether one turn may contain several calls."""

    def parse(self, written: str, tools: Sequence[ToolSpec] = ()) -> Parsed:
        """Parses the response. Calls inside thoughts are ignored, but for formats whose published code runs them.

        `written`: the policy's text since the last observation, including the stop string.
        tools: the offered tools, for formats with untyped arguments
        """

    def observation(self, results: Sequence[Message], written: str) -> str | Sequence[Message]:
        """The tool results as shown to the policy: a text that continues its turn, or messages that the chat template
        renders as separate turns, followed by the generation prompt."""

    def split(self, text: str, tools: Sequence[ToolSpec] = ()) -> "Split":
        """Optional: a response as text before its calls, calls, and text after them; by default found with `parse`."""

    def certain_content(self, text: str) -> str:
        """Optional: the beginning of an unfinished response that is no part of a call, whatever follows; by default
        nothing, so that a server sends the content at the end."""

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Optional: the calls as a policy writes them; `parse` inverts it, unless an argument contains an end tag."""


def build_tool_call_format(name: str, options: Mapping[str, Any] | None = None) -> ToolCallFormat:
    """The format named `name`: a built-in one, or a class or function `module:attribute`, called with `options`.

    Raises ConfigError for an unknown name, an unknown or missing option, or a value of another type than the default.
    """
    make: Callable[..., ToolCallFormat] = resolve("tool-call format", name, TOOL_CALL_FORMATS)
    given = dict(options or {})
    if not callable(make):
        kind = type(make).__name__
        raise ConfigError(f"tool-call format {name!r} must be a class or a function, not an object of type {kind}")
    check_options("tool-call format", name, make, given)
    built = make(**given)
    needed = [each for each in vars(ToolCallFormat) if not each.startswith("_") and each not in _OPTIONAL]
    lacking = [each for each in needed if not hasattr(built, each)]
    if lacking:
        raise ConfigError(f"{name!r} is not a tool-call format: {type(built).__name__} has no {', '.join(lacking)}")
    return built
