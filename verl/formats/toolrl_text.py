"""ToolRL's formats: the tools listed in a prompt; think, tool_call and response blocks, and the calls inside.

    <think> .. </think>
    <tool_call>
    {"name": .., "parameters": {..}}      one JSON object per line
    </tool_call>
    <response> .. </response>

Every function is linear in the length of its input, for any input.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

from verl.errors import DataError
from verl.types import Message

THINK, THINK_END = "<think>", "</think>"
TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
RESPONSE, RESPONSE_END = "<response>", "</response>"

TOOLS_HEADING = "**Available Tools**"
_LISTED_TOOL = re.compile(r"^\d+\. Name:(.*)$", re.MULTILINE)

# (start of any turn, start of an assistant turn, end of a turn)
_CHAT_MARKERS = (
    ("<|im_start|>", "<|im_start|>assistant", "<|im_end|>"),  # ChatML
    ("<|start_header_id|>", "<|start_header_id|>assistant<|end_header_id|>", "<|eot_id|>"),  # Llama 3
)

_decode = json.JSONDecoder().decode


class Shape(Enum):
    """The blocks of a gold answer, which the response must have, too: what follows the opening `<think>`, in order."""

    THOUGHT = (THINK_END,)
    CALL = (f"{THINK_END}\n{TOOL_CALL}\n", f"\n{TOOL_CALL_END}")
    ANSWER = (f"{THINK_END}\n{RESPONSE}", RESPONSE_END)
    BOTH = (f"{THINK_END}\n{TOOL_CALL}\n", f"\n{TOOL_CALL_END}\n{RESPONSE}", RESPONSE_END)


@dataclass(frozen=True, slots=True)
class Gold:
    """A parsed gold answer. `calls` is None if there are none; shared between responses, so never modified."""

    shape: Shape
    calls: list[dict[str, Any]] | None
    call_text: str


def gold_shape(answer: str) -> Shape:
    """The blocks of a gold answer, detected by its opening tags alone, at any position."""
    if TOOL_CALL in answer:
        return Shape.BOTH if RESPONSE in answer else Shape.CALL
    return Shape.ANSWER if RESPONSE in answer else Shape.THOUGHT


def final_turn(text: str) -> str:
    """The last assistant turn of a chat-templated text, stripped; a bare response is returned stripped.

    The first turn marker in the text determines the template, so that a quoted marker of another template in a prompt
    or a response is plain text. A bare response ends at an end-of-turn marker, if it has one.
    """
    first, header, end = len(text), "", ""
    for opening, its_header, its_end in _CHAT_MARKERS:
        found = text.find(opening, 0, first)
        if found >= 0:
            first, header, end = found, its_header, its_end
    start = text.rfind(header) if header else -1
    if start < 0:
        for _, _, its_end in _CHAT_MARKERS:
            text = text.partition(its_end)[0]
        return text.strip()
    return text[start + len(header) :].partition(end)[0].strip()


def shown_text(response: str) -> str:
    """The part of a response that the user sees: without the reasoning, and without ToolRL's tags."""
    shown = response.rpartition(THINK_END)[2]
    if RESPONSE in shown:
        shown = shown.rpartition(RESPONSE)[2].partition(RESPONSE_END)[0]
    return shown.strip()


def cutting_mark(text: str) -> str | None:
    """The first mark of a chat template at which `final_turn` cuts the text; None if it keeps all of it."""
    if final_turn(text) == text.strip():
        return None
    return min((mark for marks in _CHAT_MARKERS for mark in marks if mark in text), key=text.find)


def matches_shape(response: str, shape: Shape) -> bool:
    """Whether the whole response has exactly the blocks of `shape`, newline for newline, each tag once.

    Equivalent to ToolRL's regular expressions on stripped text, but never quadratic. As in ToolRL, tags of blocks that
    are not in the shape are not counted.
    """
    blocks = "".join(shape.value)
    once = [tag for tag in (TOOL_CALL, TOOL_CALL_END, RESPONSE, RESPONSE_END) if tag in blocks]
    if not response.startswith(THINK) or any(response.count(tag) != 1 for tag in once):
        return False
    *pieces, last = shape.value
    position = len(THINK)
    for piece in pieces:
        position = response.find(piece, position)
        if position < 0:
            return False
        position += len(piece)
    return response.endswith(last) and len(response) - len(last) >= position


def thought_word_count(response: str) -> int | None:
    """Word count of the last think block, split at whitespace; None if a think tag is missing."""
    if THINK not in response or THINK_END not in response:
        return None
    return len(response.rpartition(THINK)[2].partition(THINK_END)[0].split())


def call_text(response: str) -> str | None:
    """The first tool_call block, stripped, to the end if unclosed; None if a tag is missing, as in ToolRL."""
    return _first_block(response) if TOOL_CALL in response and TOOL_CALL_END in response else None


def _first_block(text: str) -> str:
    inside = text.partition(TOOL_CALL)[2].partition(TOOL_CALL)[0]  # a second opening tag ends the block
    return inside.partition(TOOL_CALL_END)[0].strip()


def parse_calls(text: str) -> list[Any]:
    """One JSON value per line. Raises ValueError (also for huge integers), or RecursionError for deep nesting."""
    return [_decode(line) for line in text.split("\n")]


@lru_cache(maxsize=4096)  # a gold answer is scored against n responses; parse it once
def parse_gold(answer: str) -> Gold:
    """The parsed gold answer. Raises DataError if it has calls that cannot be parsed."""
    shape = gold_shape(answer)
    if shape in (Shape.THOUGHT, Shape.ANSWER):
        return Gold(shape, None, "")
    text = _first_block(answer)
    return Gold(shape, [_gold_call(number, line) for number, line in enumerate(text.split("\n"), 1)], text)


def _gold_call(number: int, line: str) -> dict[str, Any]:
    expected = 'one JSON object {"name": str, "parameters": object} per line of the <tool_call> block'
    hint, place = "Correct or drop the row", f"line {number} of the gold calls"
    try:
        call = _decode(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is not JSON ({error}): {line[:80]!r}", expected, hint) from error
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise DataError(f"{place} names no tool: {line[:80]!r}", expected, hint)
    if not isinstance(call.get("parameters"), dict):
        raise DataError(f"{place} has no parameters object: {line[:80]!r}", expected, hint)
    return call


def render_call(call: dict[str, Any]) -> str:
    return json.dumps({"name": call["name"], "parameters": call["parameters"]})


def render_response(thought: str, calls: Sequence[dict[str, Any]] | None = None, response: str | None = None) -> str:
    """A response in ToolRL's grammar; blocks that are None are omitted."""
    blocks = [f"{THINK} {thought} {THINK_END}"]
    if calls is not None:
        blocks.append("\n".join([TOOL_CALL, *map(render_call, calls), TOOL_CALL_END]))
    if response is not None:
        blocks.append(f"{RESPONSE} {response} {RESPONSE_END}")
    return "\n".join(blocks)


def listed_tools(prompt: Iterable[Message]) -> tuple[str, ...] | None:
    """Names, stripped, in the order of the numbered list; None if no system message has ToolRL's tools heading."""
    for message in prompt:
        if message.role == "system" and TOOLS_HEADING in message.content:
            return tuple(name.strip() for name in _LISTED_TOOL.findall(message.content.partition(TOOLS_HEADING)[2]))
    return None
