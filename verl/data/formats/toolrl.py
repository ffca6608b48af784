"""ToolRL (arXiv 2504.13958): a thought, then calls as lines of one block, a response, or both.

Its data tell of the tools and of what was said before in their own words, inside a system and a user message.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from verl.data.formats.base import Calls, Final, Parsed, ParseError
from verl.data.formats.prompt import SystemPromptTemplateMixin, numbered_tools
from verl.data.formats.text import BadCallError, only_block, read_whole_json, to_call, to_json
from verl.types import Message, ToolCall, ToolSpec
from verl.utils.reward_score.parsing import TOOL_CALL, TOOL_CALL_END
from verl.utils.reward_score.prompt import listed_tools

HISTORY_HEADING = "**Dialogue Records History**"


@dataclass(frozen=True)
class ToolRlFormat(SystemPromptTemplateMixin):
    """Whatever it reads as calls, ToolRL's reward reads as the same calls."""

    prompt_template: str = "toolrl"

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str | Sequence[Message]:
        """ToolRL's own rows as they are; other dialogues in the form of its rows."""
        if not tools or listed_tools(messages) is not None:
            return tuple(messages)
        history = _history([message for message in messages if message.role != "system"])
        return (self.system(messages, numbered_tools(tools)), Message("user", f"{HISTORY_HEADING}\n{history}"))

    def parse(self, written: str, tools: Sequence[ToolSpec] = ()) -> Parsed:
        """Every line of the block, or what is wrong with the first that cannot be read."""
        try:
            block = only_block(written)
            if block is None:
                return Final()
            return Calls(tuple(to_call(read_whole_json(line), "parameters") for line in block.split("\n")))
        except BadCallError as error:
            return ParseError(str(error))

    def observation(self, results: Sequence[Message], written: str) -> str | Sequence[Message]:
        """A user's turn, in the form in which the data tell of results."""
        return (Message("user", _history(results)),)

    def render(self, calls: Sequence[ToolCall]) -> str:
        """The block, without a thought."""
        lines = [to_json({"name": call.name, "parameters": call.arguments}) for call in calls]
        return "\n".join([TOOL_CALL, *lines, TOOL_CALL_END])


def _history(messages: Sequence[Message]) -> str:
    """Turns with an empty line between them; results follow the call they are of on the next line."""
    text = ""
    for role, group in groupby(messages, key=lambda message: message.role):
        said = list(group)
        if role == "tool":
            text += f"\n<obs> {json.dumps([_result(each) for each in said])} </obs>"
        else:
            turns = [f"<user> {each.content} </user>" if role == "user" else each.content for each in said]
            text += "".join(f"\n\n{turn}" for turn in turns)
    return text.lstrip("\n")


def _result(message: Message) -> dict[str, Any]:
    try:
        results = read_whole_json(message.content)
    except BadCallError:
        results = message.content
    return {"name": message.tool or "", "results": results}
