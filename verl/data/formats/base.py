"""What a format is: how tools are told, how calls are written, where the policy pauses, and how answers come back.

Formats handle text alone; tokens are the framework's business. What a format returns is tokenised once and appended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from verl.errors import ConfigError
from verl.registry import check_options, resolve
from verl.types import Message, ToolCall, ToolSpec

TOOL_CALL_FORMATS: Mapping[str, str] = {
    "artist": "verl.data.formats.tags:ARTIST",
    "artist_tools": "verl.data.formats.hermes:ARTIST_TOOLS",
    "fence": "verl.data.formats.fence:FenceFormat",
    "hermes": "verl.data.formats.hermes:HermesFormat",
    "llama3_json": "verl.data.formats.llama3_json:Llama3JsonFormat",
    "otc_search": "verl.data.formats.tags:OTC_SEARCH",
    "retool": "verl.data.formats.tags:RETOOL",
    "search_r1": "verl.data.formats.tags:SEARCH_R1",
    "tags": "verl.data.formats.tags:TagsFormat",
    "tool_n1": "verl.data.formats.tool_n1:ToolN1Format",
    "toolrl": "verl.data.formats.toolrl:ToolRlFormat",
    "xml": "verl.data.formats.xml:XmlFormat",
    "zerotir": "verl.data.formats.fence:ZeroTirFormat",
}


@dataclass(frozen=True, slots=True)
class Calls:
    """The policy asks for these, side by side."""

    calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True)
class ParseError:
    """The policy meant to call a tool, but not in a way that can be read."""

    problem: str  # in words that help the policy to do better


@dataclass(frozen=True, slots=True)
class Continue:
    """The policy paused at a stop string without asking for anything yet: it is to go on from where it is."""


@dataclass(frozen=True, slots=True)
class Final:
    """The policy is done: this is its answer."""


Parsed = Calls | ParseError | Continue | Final


class ToolCallFormat(Protocol):
    """One format. Stateless: the same text gives the same answer, and it never raises for what a policy wrote."""

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str | Sequence[Message]:
        """The prompt: messages for the model's chat template, or a plain text where the recipe uses no template."""

    @property
    def template_tools(self) -> bool:
        """Whether the chat template is to tell of the tools itself (`tools=`), so that `render_prompt` does not."""

    def stop_strings(self, written: str) -> tuple[str, ...]:
        """Where the policy is to pause, besides at its end token. `written`: its text since the last observation."""

    @property
    def final_stop_strings(self) -> tuple[str, ...]:
        """Where the last assistant turn stops, in which no tool is run: at what ends an answer in this format."""

    @property
    def turns_per_call(self) -> int:
        """Assistant turns that one call costs: as many as the policy is made to pause until the call is run."""

    @property
    def parallel_calls(self) -> bool:
        """Whether one turn may hold several calls."""

    def parse(self, written: str, tools: Sequence[ToolSpec] = ()) -> Parsed:
        """What the policy asks for. Calls inside its thinking are none.

        `written`: all of its text since the last observation, the stop string that it paused at included.
        tools: those that are offered, for formats that write arguments without their types
        """

    def observation(self, results: Sequence[Message], written: str) -> str | Sequence[Message]:
        """The answers as they are put before the policy: a text that continues its own turn, or messages that the
        chat template puts into turns of their own, with the head of the policy's next turn."""

    def render(self, calls: Sequence[ToolCall]) -> str:
        """How a policy writes these calls; `parse` reads them back, unless a text in them ends a call or a thought."""


_ASKED = (  # of every format in an episode
    "render_prompt",
    "template_tools",
    "stop_strings",
    "final_stop_strings",
    "turns_per_call",
    "parallel_calls",
    "parse",
    "observation",
)


def build_tool_call_format(name: str, options: Mapping[str, Any] | None = None) -> ToolCallFormat:
    """The format called `name`: a known one, or a class or function `module:attribute`, made with `options`.

    Raises ConfigError for an unknown name, an unknown or missing option, or a value of another type than the default.
    """
    make: Callable[..., ToolCallFormat] = resolve("codec", name, TOOL_CALL_FORMATS)
    given = dict(options or {})
    if not callable(make):
        raise ConfigError(f"codec {name!r} must be a class or a function, not an object of {type(make).__name__}")
    check_options("codec", name, make, given)
    made = make(**given)
    lacking = [each for each in _ASKED if not hasattr(made, each)]
    if lacking:
        raise ConfigError(f"{name!r} is no codec: {type(made).__name__} has no {', '.join(lacking)}")
    return made
