"""Text of unknown length and origin: results as text, truncated, without what no file or terminal takes; digests."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from verl.json_values import as_json_value
from verl.types import Message

NOTE_CHARS = 60  # upper bound for the note in a truncated text


def shortened(text: str, max_chars: int) -> str:
    """The text truncated in the middle to `max_chars`, without lone surrogates."""
    if len(text) > max_chars:
        half = (max_chars - NOTE_CHARS) // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
    return utf8(text)


def utf8(text: str) -> str:
    """The text without lone surrogates, which JSON can encode but neither UTF-8 nor a tokenizer accepts."""
    return text.encode(errors="replace").decode()


def as_text(result: Any) -> str:
    """A function's result: a string unchanged, everything else as JSON. Raises like `as_json_value`."""
    return result if isinstance(result, str) else json.dumps(as_json_value(result), ensure_ascii=False)


def prompt_sha256(messages: Iterable[Message]) -> str:
    text = json.dumps([[message.role, message.content] for message in messages])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def printable(text: str) -> str:
    """The text for a terminal: U+FFFD for every character that is not printable, but for tabs and line breaks.

    These are C0 and C1 controls (escape sequences), controls of the writing direction, and lone surrogates.
    """
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)


def shared_start(one: str, other: str) -> str:
    length = next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    return one[:length] if length is not None else min(one, other, key=len)


def counted(count: int, noun: str) -> str:
    """`1 line`, `2 lines`"""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def in_short(error: Exception) -> str:
    """The type and first line of an error, without lists of all models and advice on upgrades."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
