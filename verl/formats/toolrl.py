"""ToolRL (arXiv 2504.13958): a thought, then calls as lines of one block, a response, or both.

Its data has its own text format for the tools and the dialogue history, inside a system and a user message.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

from verl.formats import jinja
from verl.formats.base import Parsed
from verl.formats.prompt import SystemPromptTemplateMixin, numbered_tools
from verl.formats.text import BadCallError, only_block, parsed, read_whole_json, to_call, to_json
from verl.formats.toolrl_text import TOOL_CALL, TOOL_CALL_END, listed_tools
from verl.types import Message, ToolCall, ToolSpec

HISTORY_HEADING = "**Dialogue Records History**"


@dataclass(frozen=True)
class ToolRlFormat(SystemPromptTemplateMixin):
    """Parses calls exactly as ToolRL's reward does."""

    needs_thought: ClassVar[bool] = True
    serving_template: ClassVar[str | None] = "toolrl"
    prompt_template: str = "toolrl"

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str | Sequence[Message]:
        """ToolRL's own rows unchanged; other dialogues in the format of its rows."""
        if not tools or listed_tools(messages) is not None:
            return tuple(messages)
        history = _history([message for message in messages if message.role != "system"])
        return (self.system(messages, numbered_tools(tools)), Message("user", f"{HISTORY_HEADING}\n{history}"))

    def parse(self, written: str, tools: Sequence[ToolSpec] = ()) -> Parsed:
        return parsed(_calls(written))

    def observation(self, results: Sequence[Message], written: str) -> str | Sequence[Message]:
        return (Message("user", _history(results)),)

    def render(self, calls: Sequence[ToolCall]) -> str:
        lines = [to_json({"name": call.name, "parameters": call.arguments}) for call in calls]
        return "\n".join([TOOL_CALL, *lines, TOOL_CALL_END])

    def calls_jinja(self) -> str:
        return jinja.around(f"{TOOL_CALL}\n", jinja.each_call(jinja.call_object("parameters")), f"\n{TOOL_CALL_END}")


def _calls(written: str) -> Iterator[ToolCall]:
    block = only_block(written)
    if block is not None:
        yield from (to_call(read_whole_json(line), "parameters") for line in block.split("\n"))


def _history(messages: Sequence[Message]) -> str:
    """Turns separated by empty lines; results follow on the line after their call."""
    text = ""
    for role, group in groupby(messages, key=lambda message: message.role):
        same_role = list(group)
        if role == "tool":
            text += f"\n<obs> {json.dumps([_result(each) for each in same_role])} </obs>"
        else:
            turns = [f"<user> {each.content} </user>" if role == "user" else each.content for each in same_role]
            text += "".join(f"\n\n{turn}" for turn in turns)
    return text.lstrip("\n")


def _result(message: Message) -> dict[str, Any]:
    try:
        results = read_whole_json(message.content)
    except BadCallError:
        results = message.content
    return {"name": message.tool or "", "results": results}
