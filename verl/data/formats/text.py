"""What the formats share: where speech ends and thinking begins, JSON as policies write it, and long outputs cut.

Every function is linear in the length of its text, whatever the text.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NoReturn

from verl.types import ToolCall
from verl.utils.reward_score.parsing import THINK, THINK_END, TOOL_CALL, TOOL_CALL_END

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
    """A call that cannot be read; the text is what the policy gets to see."""


def speech_start(text: str, in_thought: bool = False) -> int:
    """Where what the policy says begins: behind a thought that the prompt opened, else at 0.

    A `</think>` without a `<think>` before it ends such a thought, so text that merely quotes one counts as thinking.
    in_thought: the prompt is known to open one, so that without a `</think>` all is thinking.
    """
    end = text.find(THINK_END)
    if end < 0:
        return len(text) if in_thought else 0
    return end + len(THINK_END) if in_thought or text.find(THINK, 0, end) < 0 else 0


def find_spoken(text: str, tag: str, position: int) -> int:
    """Where the next `tag` begins that is outside thoughts, from a `position` outside of one; -1 if there is none."""
    either = _tag_or_thought(tag)
    while found := either.search(text, position):
        if found[0] == tag:
            return found.start()
        end = text.find(THINK_END, found.end())
        if end < 0:
            return -1
        position = end + len(THINK_END)
    return -1


@lru_cache(maxsize=64)
def _tag_or_thought(tag: str) -> re.Pattern[str]:
    return re.compile(f"{re.escape(THINK)}|{re.escape(tag)}")


def skip_space(text: str, position: int) -> int:
    """The first position from here on that is no white space."""
    found = _SPACE.match(text, position)
    assert found is not None
    return found.end()


def only_block(written: str) -> str | None:
    """The inside of the one `<tool_call>` block outside thoughts, up to the first closing tag; None without a block.

    Raises BadCallError for a block that is not closed, and for a second one.
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


def read_json(text: str, position: int = 0) -> tuple[Any, int]:
    """(the JSON value that begins at `position` or after white space, where it ends).

    Raises BadCallError for what is no JSON, and for what other programs would choke on: NaN, infinities, a key twice,
    half a surrogate pair.
    """
    start = skip_space(text, position)
    try:
        value, end = _DECODER.raw_decode(text, start)
        json.dumps(value, ensure_ascii=False).encode()
    except BadCallError:
        raise
    except json.JSONDecodeError as error:
        place = error.pos - start + 1
        raise BadCallError(f"The call is not valid JSON: {error.msg} (character {place}).") from error
    except UnicodeEncodeError as error:
        raise BadCallError("The call is not valid JSON: a \\u escape is half of a surrogate pair.") from error
    except RecursionError as error:
        raise BadCallError("The call is nested too deep.") from error
    except ValueError as error:  # Python converts no integer of more than 4300 digits
        raise BadCallError("The call holds a number with too many digits.") from error
    return value, end


def read_whole_json(text: str) -> Any:
    """The one JSON value that the text is. Raises BadCallError as `read_json` does, and if anything follows."""
    value, end = read_json(text)
    if skip_space(text, end) < len(text):
        raise BadCallError("There is text after the JSON of the call.")
    return value


def to_call(value: Any, key: str) -> ToolCall:
    """The call that a JSON value is: an object with "name", a string, and its arguments, an object, under `key`.

    Raises BadCallError. Further keys are left alone.
    """
    if not isinstance(value, dict):
        raise BadCallError(f'A call is a JSON object with "name" and "{key}", not {_KINDS[type(value)]}.')
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        raise BadCallError('The call names no tool: "name" must be a string.')
    if key not in value:
        raise BadCallError(f'The call of {name[:80]!r} has no "{key}"; write {{}} where there are none.')
    if not isinstance(value[key], dict):
        kind = _KINDS[type(value[key])]
        raise BadCallError(f'"{key}" in the call of {name[:80]!r} must be a JSON object, not {kind}.')
    return ToolCall(name, value[key])


def to_json(value: Any, tags: Iterable[str] = (THINK, THINK_END, TOOL_CALL, TOOL_CALL_END)) -> str:
    """The value as JSON, in which no tag appears: its `<` is written as an escape."""
    text = json.dumps(value, ensure_ascii=False)
    for tag in tags:
        text = text.replace(tag, f"\\u003c{tag[1:]}")
    return text


def shorten(text: str, limit: int) -> str:
    """A text of `limit` characters or more without its middle."""
    half = limit // 2
    return text if len(text) < limit else f"{text[:half]}...{text[len(text) - half :]}"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise BadCallError(f"The call has the key {twice[:80]!r} twice.")
    return found


def _number(text: str) -> float:
    if (value := float(text)) in (float("inf"), float("-inf")):
        _no_number(text)
    return value


def _no_number(text: str) -> NoReturn:
    raise BadCallError(f"The call is not valid JSON: {text[:20]} is no number.")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_number, parse_constant=_no_number)
