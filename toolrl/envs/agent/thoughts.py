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

FIELDS = ("reasoning_content", "reasoning", "thinking", "thinking_blocks", "reasoning_details")  # message fields
_TEXTS = ("text", "thinking")  # keys of entries in the two list fields
_THOUGHT = re.compile(f"{THINK}(.*?)(?:{THINK_END}|$)", re.DOTALL)


class OnThoughts(StrEnum):
    """Treatment of responses that the program repeats without their thoughts."""

    RESTORE = "restore"  # it is the recorded response, if only one can be meant
    OMIT = "omit"  # the policy does not see them again, in a segment of its own


def divided(text: str) -> tuple[str, str]:
    """(the thoughts, the text outside of them)"""
    start = speech_start(text)
    thoughts = [text[:start].removesuffix(THINK_END), *(match[1] for match in _THOUGHT.finditer(text, start))]
    return "\n".join(thoughts), _THOUGHT.sub("", text[start:])


def in_fields(message: Message) -> list[str]:
    """The thoughts beside the content, once for each field that has some."""
    fields = message.template_fields
    texts = [_text(fields[name]) for name in FIELDS if name in fields]
    return [text for text in texts if text.strip()]


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    parts = [part for part in value if isinstance(part, Mapping)] if isinstance(value, Sequence) else []
    return "\n".join(str(part[name]) for part in parts for name in _TEXTS if part.get(name))


def is_response(known: Message, sent: Message, thoughtless: bool = False) -> bool:
    """Whether a program's message is this response, with all of its thoughts in fields or tags.

    thoughtless: with none of them. White space does not count: SDKs strip both parts.
    """
    if known.role != "assistant" or sent.role != "assistant":
        return False
    (thought, text), (own, spoken) = divided(known.content), divided(sent.content)
    thoughts = {_plain(each) for each in (own, *in_fields(sent))} - {""}
    calls = [[(call.name, call.arguments) for call in each.tool_calls] for each in (known, sent)]
    expected = set() if thoughtless else {_plain(thought)}
    return _plain(thought) != "" and thoughts == expected and _plain(text) == _plain(spoken) and calls[0] == calls[1]


def with_content(message: Message, content: str) -> Message:
    """The message with this content in place of its own and of its fields of thoughts."""
    fields = {name: each for name, each in message.template_fields.items() if name not in ("content", *FIELDS)}
    return replace(message, content=content, template_fields=fields)


def _plain(text: str) -> str:
    return " ".join(text.split())
