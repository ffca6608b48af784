"""Responses as SDKs repeat them: without their thoughts, or with the thoughts in a field beside the content."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any

from verl.formats.text import speech_start
from verl.formats.toolrl_text import THINK, THINK_END
from verl.types import Message

FIELDS = ("reasoning_content", "reasoning", "thinking", "thinking_blocks", "reasoning_details")  # of messages
_TEXTS = ("text", "thinking")  # of an entry of the two that are lists
_THOUGHT = re.compile(f"{THINK}(.*?)(?:{THINK_END}|$)", re.DOTALL)


class OnThoughts(StrEnum):
    """What happens to a response that the program repeats without its thoughts."""

    RESTORE = "restore"  # it is the recorded response, if only one can be meant
    OMIT = "omit"  # the policy does not see them again, in a segment of its own


def divided(text: str) -> tuple[str, str]:
    """(the thoughts, the text outside of them)"""
    start = speech_start(text)
    thoughts = [text[:start].removesuffix(THINK_END), *(found[1] for found in _THOUGHT.finditer(text, start))]
    return "\n".join(thoughts), _THOUGHT.sub("", text[start:])


def in_fields(message: Message) -> list[str]:
    """The thoughts beside the content, once for each field that has some."""
    given = message.template_fields
    texts = [_text(given[name]) for name in FIELDS if name in given]
    return [text for text in texts if text.strip()]


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    parts = [part for part in value if isinstance(part, Mapping)] if isinstance(value, Sequence) else []
    return "\n".join(str(part[name]) for part in parts for name in _TEXTS if part.get(name))


def is_response(known: Message, given: Message, thoughtless: bool = False) -> bool:
    """Whether a program's message is this response, with all of its thoughts in fields or tags.

    thoughtless: with none of them. White space does not count: SDKs strip both parts.
    """
    if known.role != "assistant" or given.role != "assistant":
        return False
    (thought, text), (own, spoken) = divided(known.content), divided(given.content)
    thoughts = {_plain(each) for each in (own, *in_fields(given))} - {""}
    calls = [[(call.name, call.arguments) for call in each.tool_calls] for each in (known, given)]
    expected = set() if thoughtless else {_plain(thought)}
    return _plain(thought) != "" and thoughts == expected and _plain(text) == _plain(spoken) and calls[0] == calls[1]


def with_content(given: Message, content: str) -> Message:
    """The message with this content in place of its own and of its fields of thoughts."""
    fields = {name: each for name, each in given.template_fields.items() if name not in ("content", *FIELDS)}
    return replace(given, content=content, template_fields=fields)


def _plain(text: str) -> str:
    return " ".join(text.split())
