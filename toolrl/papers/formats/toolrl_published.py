"""The format in which ToolRL's authors evaluate on BFCL: a dialogue in one user message, and lenient reading of calls.

Their sentences, which the dialogue has besides its messages, come from the prompt template:

    .. {tools} ..                                  the system message
    **Dialogue Records History**                   from here on optional
    <user> {question} .. </user>                   a turn of the user
    <obs> .. {tool} .. {result} .. </obs>          the result of a call; optional, with what follows the last result
    ..
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from verl.errors import ConfigError
from verl.formats.base import Calls, Parsed
from verl.formats.prompt import filled, numbered_tools
from verl.formats.split import Split, content_before
from verl.formats.text import BadCallError, parsed
from verl.formats.toolrl import HISTORY_HEADING, ToolRlFormat
from verl.formats.toolrl_text import TOOL_CALL, TOOL_CALL_END, listed_tools
from verl.types import Message, ToolCall, ToolSpec

_NO_TOOL = "none"  # a call of this name, in upper or lower case, means that no tool fits
_TYPES = {"number": "float", "object": "dict"}  # JSON Schema's name of a type: BFCL's


@dataclass(frozen=True)
class ToolRlPublishedFormat(ToolRlFormat):
    """Calls are the lines of the last block, in a thought or not, closed or not; other lines are skipped."""

    needs_thought: ClassVar[bool] = False
    serving_template: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self._turns  # raises early

    @cached_property
    def _turns(self) -> dict[str, str]:
        """Templates of a user's turn, a result, and what follows the last result."""
        assert self.prompt is not None
        templates = {"user": "<user> {question} </user>", "result": "<obs> {result} </obs>", "after": ""}
        _, heading, turns = self.prompt.text.partition(HISTORY_HEADING)
        if heading:
            templates["user"], turns = self._first(turns, "user", "{question}")
        if turns:
            templates["result"], templates["after"] = self._first(turns, "obs", "{result}")
        return templates

    def _first(self, text: str, tag: str, place: str) -> tuple[str, str]:
        """(the block with which the text begins, the text after it). Raises ConfigError for another beginning."""
        inside, end, rest = text.strip().partition(f"</{tag}>")
        if not end or not inside.startswith(f"<{tag}>") or place not in inside:
            blocks = "<user> .. {question} .. </user> and perhaps <obs> .. {result} .. </obs>"
            raise ConfigError(
                f"the prompt template {self.prompt_template!r} must have {blocks} after {HISTORY_HEADING}, not "
                f"{inside[:80]!r}"
            )
        return inside + end, rest.strip()

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Sequence[Message]:
        """ToolRL's own rows unchanged. Of other dialogues the system message is left out, as published, and parameters
        are listed as BFCL has them; without tools the list is empty."""
        if listed_tools(messages) is not None:
            return tuple(messages)
        assert self.prompt is not None
        system = self.prompt.text.partition(HISTORY_HEADING)[0]
        listed = [replace(tool, parameters=_as_in_bfcl(tool.parameters)) for tool in tools]
        system = filled(system, question="", tools=numbered_tools(listed, common={}))
        dialogue = self._history([message for message in messages if message.role != "system"])
        return (Message("system", system), Message("user", f"{HISTORY_HEADING}\n{dialogue}"))

    def observation(self, results: Sequence[Message], written: str) -> Sequence[Message]:
        return (Message("user", self._history(results)),)

    def parse(self, written: str, tools: Sequence[ToolSpec] = ()) -> Parsed:
        return parsed(_calls(written))

    def split(self, text: str, tools: Sequence[ToolSpec] = ()) -> Split:
        parsed = self.parse(text, tools)
        if not isinstance(parsed, Calls):
            return Split(text)
        before, _, after = text.rpartition(TOOL_CALL)
        return Split(before, parsed.calls, after.partition(TOOL_CALL_END)[2]).stripped()

    def certain_content(self, text: str) -> str:
        return content_before(text, text.find(TOOL_CALL), (TOOL_CALL,)).rstrip()

    def _history(self, messages: Sequence[Message]) -> str:
        return "\n".join(self._entries(messages)).strip()

    def _entries(self, messages: Sequence[Message]) -> Iterator[str]:
        for message in messages:
            text = message.content.strip()
            if message.role == "user":
                yield filled(self._turns["user"], question=text)
            elif message.role == "tool":
                yield filled(self._turns["result"], tool=(message.tool or "").strip(), result=text)
            else:
                yield f"\n{text}"
        if messages and messages[-1].role == "tool":
            yield f"\n{self._turns['after']}"


def _as_in_bfcl(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with BFCL's names of types."""
    converted = dict(schema)
    if isinstance(kind := converted.get("type"), str):
        converted["type"] = _TYPES.get(kind, kind)
    if isinstance(items := converted.get("items"), Mapping):
        converted["items"] = _as_in_bfcl(items)
    if isinstance(properties := converted.get("properties"), Mapping):
        converted["properties"] = {
            name: _as_in_bfcl(each) if isinstance(each, Mapping) else each for name, each in properties.items()
        }
    return converted


def _calls(written: str) -> Iterator[ToolCall]:
    """Raises BadCallError for a call without an object of parameters: BFCL counts no call of such a response."""
    _, tag, after = written.rpartition(TOOL_CALL)
    for line in after.partition(TOOL_CALL_END)[0].strip().split("\n") if tag else ():
        call = _json(line)
        if not isinstance(call, dict) or "parameters" not in call or not isinstance(name := call.get("name"), str):
            continue
        if name.strip().lower() == _NO_TOOL:
            continue
        if not isinstance(call["parameters"], dict):
            raise BadCallError(f'"parameters" in the call of {name[:80]!r} must be a JSON object.')
        yield ToolCall(name, call["parameters"])


def _json(line: str) -> Any:
    """Parsed by Python's json, with NaN and repeated keys; None if that fails or the text cannot be encoded."""
    try:
        value = json.loads(line)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value
