"""Shared helpers of the formats: skipping thoughts, parsing the policy's JSON.

Every function is linear in the length of its input, for any input.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from verl.formats.base import Calls, Final, Parsed, ParseError
from verl.formats.toolrl_text import THINK, THINK_END, TOOL_CALL, TOOL_CALL_END
from verl.json_values import JsonError, strict_decoder
from verl.types import ToolCall

_SPACE = re.compile(r"\s*")
_KINDS: Mapping[type, str] = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "a truth value",
    int: "a number",
    float: "a number",
    type(None): "null",
}


class BadCallError(ValueError):
    """A malformed call; the message is shown to the policy."""


def parsed(calls: Iterable[ToolCall]) -> Parsed:
    """These calls, or the error of the first malformed one, at which reading them raises BadCallError."""
    try:
        found = tuple(calls)
    except BadCallError as error:
        return ParseError(str(error))
    return Calls(found) if found else Final()


def each_call(
    written: str, opening: str, position: int, read: Callable[[str, int], tuple[ToolCall, int]]
) -> Iterator[ToolCall]:
    """The calls after every `opening` outside thoughts. read: (text, end of the opening) -> (call, end of the call)"""
    while (start := find_spoken(written, opening, position)) >= 0:
        call, position = read(written, start + len(opening))
        yield call


def speech_start(text: str, in_thought: bool = False) -> int:
    """Start of the text outside thoughts: the end of a thought opened by the prompt, else 0.

    A `</think>` without a preceding `<think>` ends such a thought, so text before a quoted `</think>` counts as one.
    in_thought: the prompt opens a thought, so that without a `</think>` everything is a thought.
    """
    end = text.find(THINK_END)
    if end < 0:
        return len(text) if in_thought else 0
    return end + len(THINK_END) if in_thought or text.find(THINK, 0, end) < 0 else 0


def find_spoken(text: str, tag: str, position: int) -> int:
    """Position of the next `tag` outside thoughts, searching from a `position` outside one; -1 if there is none."""
    either = _tag_or_thought(tag)
    while found := either.search(text, position):
        if found[0] == tag:
            return found.start()
        end = text.find(THINK_END, found.end())
        if end < 0:
            return -1
        position = end + len(THINK_END)
    return -1


def without_thoughts(text: str) -> str:
    """The text outside thoughts. A `<think>` inside a call opens a thought, too."""
    pieces, position = [], speech_start(text)
    while (start := text.find(THINK, position)) >= 0:
        pieces.append(text[position:start])
        end = text.find(THINK_END, start)
        position = len(text) if end < 0 else end + len(THINK_END)
    return "".join(pieces) + text[position:]


@lru_cache(maxsize=64)
def _tag_or_thought(tag: str) -> re.Pattern[str]:
    return re.compile(f"{re.escape(THINK)}|{re.escape(tag)}")


def skip_space(text: str, position: int) -> int:
    """The next position that is not whitespace."""
    found = _SPACE.match(text, position)
    assert found is not None
    return found.end()


def only_block(written: str) -> str | None:
    """Content of the single `<tool_call>` block outside thoughts, up to the first closing tag; None without a block.

    Raises BadCallError for an unclosed block and for a second one.
    """
    start = find_spoken(written, TOOL_CALL, speech_start(written))
    if start < 0:
        return None
    start += len(TOOL_CALL)
    end = written.find(TOOL_CALL_END, start)
    if end < 0:
        raise BadCallError(f"{TOOL_CALL} is never closed with {TOOL_CALL_END}.")
    if TOOL_CALL in written[start:end] or find_spoken(written, TOOL_CALL, end) >= 0:
        raise BadCallError(f"There is more than one {TOOL_CALL} block; put all calls into one.")
    return written[start:end].strip()


def parse_json(text: str, position: int = 0) -> tuple[Any, int]:
    """(the JSON value at `position`, after optional whitespace; its end).

    Raises BadCallError for invalid JSON and for values that other programs reject: NaN, infinities, duplicate keys,
    lone surrogates.
    """
    start = skip_space(text, position)
    try:
        value, end = _DECODER.raw_decode(text, start)
        json.dumps(value, ensure_ascii=False).encode()
    except JsonError as error:
        raise BadCallError(f"The call {error.problem}.") from error
    except json.JSONDecodeError as error:
        place = error.pos - start + 1
        raise BadCallError(f"The call is not valid JSON: {error.msg} (character {place}).") from error
    except UnicodeEncodeError as error:
        raise BadCallError("The call is not valid JSON: a \\u escape is half of a surrogate pair.") from error
    except RecursionError as error:
        raise BadCallError("The call is nested too deeply.") from error
    except ValueError as error:  # Python's limit of 4300 digits per integer
        raise BadCallError("The call holds a number with too many digits.") from error
    return value, end


def read_whole_json(text: str) -> Any:
    """The text parsed as a single JSON value. Raises BadCallError like `parse_json`, and for trailing text."""
    value, end = parse_json(text)
    if skip_space(text, end) < len(text):
        raise BadCallError("There is text after the JSON of the call.")
    return value


def to_call(value: Any, key: str) -> ToolCall:
    """Converts a JSON value to a call: an object with "name", a string, and the arguments, an object, under `key`.

    Raises BadCallError. Other keys are ignored.
    """
    if not isinstance(value, dict):
        raise BadCallError(f'A call is a JSON object with "name" and "{key}", not {_KINDS[type(value)]}.')
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        raise BadCallError('The call names no tool: "name" must be a string.')
    if key not in value:
        raise BadCallError(f'The call of {name[:80]!r} has no "{key}"; write {{}} if there are none.')
    if not isinstance(value[key], dict):
        kind = _KINDS[type(value[key])]
        raise BadCallError(f'"{key}" in the call of {name[:80]!r} must be a JSON object, not {kind}.')
    return ToolCall(name, value[key])


def to_json(value: Any, tags: Iterable[str] = (THINK, THINK_END, TOOL_CALL, TOOL_CALL_END)) -> str:
    """The value as JSON without any of the tags: their `<` is escaped."""
    text = json.dumps(value, ensure_ascii=False)
    for tag in tags:
        text = text.replace(tag, f"\\u003c{tag[1:]}")
    return text


_DECODER = strict_decoder()
