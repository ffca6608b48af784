"""ToolRL's response grammar: think, tool_call and response blocks, and the calls inside.

    <think> .. </think>
    <tool_call>
    {"name": .., "parameters": {..}}      one JSON object per line
    </tool_call>
    <response> .. </response>

Every function is linear in the length of its text, whatever the text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

from verl.errors import DataError

THINK, THINK_END = "<think>", "</think>"
TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
RESPONSE, RESPONSE_END = "<response>", "</response>"

# (any turn opens with, the assistant's turn opens with, a turn ends with)
_CHAT_MARKERS = (
    ("<|im_start|>", "<|im_start|>assistant", "<|im_end|>"),  # ChatML
    ("<|start_header_id|>", "<|start_header_id|>assistant<|end_header_id|>", "<|eot_id|>"),  # Llama 3
)

_decode = json.JSONDecoder().decode


class Shape(Enum):
    """Which blocks an answer has, and so which ones the response must have."""

    THOUGHT = "think block alone"
    CALL = "think and tool_call blocks"
    RESPONSE = "think and response blocks"
    BOTH = "think, tool_call and response blocks"


@dataclass(frozen=True, slots=True)
class Gold:
    """A parsed gold answer. `calls` is None where the answer makes none; shared between responses, so never changed."""

    shape: Shape
    calls: list[dict[str, Any]] | None
    call_text: str


def shape_of(answer: str) -> Shape:
    """The blocks of a gold answer, told by its opening tags alone, wherever they stand."""
    if TOOL_CALL in answer:
        return Shape.BOTH if RESPONSE in answer else Shape.CALL
    return Shape.RESPONSE if RESPONSE in answer else Shape.THOUGHT


def final_turn(text: str) -> str:
    """The assistant's last turn of a chat-templated text, stripped; a bare response is returned as it is, stripped.

    The template is the one whose turn marker comes first in the text, so that a marker of another template quoted in a
    prompt or a response is text like any other. A bare response ends at an end-of-turn marker that it still carries.
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


def matches_shape(response: str, shape: Shape) -> bool:
    """Whether the whole response has exactly the blocks of `shape`, newline for newline, each tag once.

    Equal to ToolRL's regular expressions on stripped text, but never quadratic. Tags of blocks that the shape does not
    have are not counted, as in ToolRL.
    """
    if not response.startswith(THINK):
        return False
    if shape is Shape.THOUGHT:
        return response.endswith(THINK_END) and len(response) >= len(THINK) + len(THINK_END)
    if shape is Shape.RESPONSE:
        return _once(response, RESPONSE, RESPONSE_END) and _ordered(response, f"{THINK_END}\n{RESPONSE}", RESPONSE_END)
    if not _once(response, TOOL_CALL, TOOL_CALL_END):
        return False
    head = f"{THINK_END}\n{TOOL_CALL}\n"
    if shape is Shape.CALL:
        return _ordered(response, head, f"\n{TOOL_CALL_END}")
    middle = f"\n{TOOL_CALL_END}\n{RESPONSE}"
    return _once(response, RESPONSE, RESPONSE_END) and _ordered(response, head, middle, RESPONSE_END)


def _once(text: str, opening: str, closing: str) -> bool:
    return text.count(opening) == 1 and text.count(closing) == 1


def _ordered(response: str, *pieces: str) -> bool:
    """Whether the pieces follow each other after the opening `<think>`, the last one closing the response."""
    position = len(THINK)
    for piece in pieces[:-1]:
        position = response.find(piece, position)
        if position < 0:
            return False
        position += len(piece)
    return response.endswith(pieces[-1]) and len(response) - len(pieces[-1]) >= position


def think_words(response: str) -> int | None:
    """Number of whitespace-separated words of the last think block; None where a think tag is missing."""
    if THINK not in response or THINK_END not in response:
        return None
    return len(response.rpartition(THINK)[2].partition(THINK_END)[0].split())


def call_text(response: str) -> str | None:
    """The inside of the first tool_call block, stripped; None where either tag is missing.

    A block that is never closed runs to the end of the text (its closing tag may stand before it), as in ToolRL.
    """
    if TOOL_CALL not in response or TOOL_CALL_END not in response:
        return None
    return _first_block(response)


def _first_block(text: str) -> str:
    inside = text.partition(TOOL_CALL)[2].partition(TOOL_CALL)[0]  # a second opening tag ends the block
    return inside.partition(TOOL_CALL_END)[0].strip()


def parse_calls(text: str) -> list[Any]:
    """One JSON value per line, whatever its type.

    Raises ValueError (bad JSON, or an integer of more digits than Python converts) or RecursionError (nested too deep).
    """
    return [_decode(line) for line in text.split("\n")]


@lru_cache(maxsize=4096)  # a gold answer is scored against n responses; parse it once
def parse_gold(answer: str) -> Gold:
    """The gold answer, parsed. Raises DataError when it announces calls that cannot be read."""
    shape = shape_of(answer)
    if shape in (Shape.THOUGHT, Shape.RESPONSE):
        return Gold(shape, None, "")
    text = _first_block(answer)
    return Gold(shape, [_gold_call(number, line) for number, line in enumerate(text.split("\n"), 1)], text)


def _gold_call(number: int, line: str) -> dict[str, Any]:
    expected = 'one JSON object {"name": str, "parameters": object} per line of the <tool_call> block'
    hint = "Correct or drop the row"
    try:
        call = _decode(line)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"line {number} of the gold calls is not JSON ({error}): {line[:80]!r}", expected, hint
        ) from error
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise DataError(f"line {number} of the gold calls names no tool: {line[:80]!r}", expected, hint)
    if not isinstance(call.get("parameters"), dict):
        raise DataError(f"line {number} of the gold calls has no parameters object: {line[:80]!r}", expected, hint)
    return call


def render_call(call: dict[str, Any]) -> str:
    """One call as ToolRL writes it: one line of JSON with name and parameters."""
    return json.dumps({"name": call["name"], "parameters": call["parameters"]})


def render_response(thought: str, calls: Sequence[dict[str, Any]] | None = None, response: str | None = None) -> str:
    """A response in ToolRL's grammar; a block that is None is left out."""
    blocks = [f"{THINK} {thought} {THINK_END}"]
    if calls is not None:
        blocks.append("\n".join([TOOL_CALL, *map(render_call, calls), TOOL_CALL_END]))
    if response is not None:
        blocks.append(f"{RESPONSE} {response} {RESPONSE_END}")
    return "\n".join(blocks)
