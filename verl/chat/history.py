"""What a chat template makes of earlier turns.

An episode is append-only: the policy keeps seeing what it wrote. Chat templates of thinking models render every turn
anew, and some then leave out its thought, or an empty one that the prompt itself began. A server that renders such a
history shows the policy other prompts than training did.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from verl.chat.observations import ObservationTokenizer
from verl.chat.template import ChatTemplate
from verl.errors import ConfigError, DataError
from verl.formats.toolrl_text import THINK, THINK_END
from verl.text import shared_start
from verl.types import Message, ToolCall

THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")  # of messages; each family reads one or two of them
_MARKS = ("<|channel>thought", "<channel|>")  # Gemma 4's around a thought
_ASKED = "<|think|>"  # Gemma 4's prompts ask for thoughts
# Variables with which families keep all turns as they were written: Qwen 3.6 and 3.8, LFM 2.5; Nemotron 3
_SWITCHES: tuple[Mapping[str, Any], ...] = ({"preserve_thinking": True}, {"truncate_history_thinking": False})
_CLOSED = re.compile(rf"{THINK}\s*{THINK_END}\s*\Z")  # the end of a prompt that leaves the policy no thought
_QUESTION, _ID = Message("user", "a"), "call00000"
_CALL, _RESULT = ToolCall("trial", {"text": "b"}, _ID), Message("tool", "7", tool="trial", tool_call_id=_ID)
_THOUGHT, _ANSWER = "Hm.", "c"
_SHOWN = 40  # characters of a turn


@dataclass(frozen=True, slots=True)
class Rewriting:
    """A turn that a chat template renders otherwise once messages of this role follow.

    switch: variables of the template with which it does not; empty: none are known
    """

    role: str
    written: str
    later: str
    switch: Mapping[str, Any]

    def __str__(self) -> str:
        return (
            f"renders a turn of the policy anew if a message of the role {self.role} follows: {self.written!r} becomes "
            f"{self.later!r}, but an episode keeps what the policy saw and wrote"
        )


def _thinks(chat: ChatTemplate) -> bool:
    """Whether the prompts of this chat template leave thoughts to the policy."""
    prompt = chat.frame.prompt
    return not _CLOSED.search(prompt) and (thought_marks(chat) != _MARKS or _ASKED in prompt)


def thought_marks(chat: ChatTemplate) -> tuple[str, str]:
    """The texts around a thought in the turns of this chat template."""
    return _MARKS if _MARKS[1] in str(chat.tokenizer.chat_template) else (THINK, THINK_END)


def check_history(observations: ObservationTokenizer, users: bool) -> str | None:
    """A warning if prompts of a server will differ from those of the episodes, because the template rewrites turns.

    users: whether messages of users may follow a turn, beside results of tools
    Raises ConfigError if a variable of the chat template keeps the turns as they are.
    """
    if observations.raw:
        return None
    chat = observations.chat
    shown = observations.tool_call_format.observation((_RESULT,), "")
    followers = [] if isinstance(shown, str) else [tuple(shown)]
    for following in [*followers, *([(_QUESTION,)] if users else [])]:
        found = rewriting(chat, following)
        if found and found.switch:
            pairs = ", ".join(f"{key}: {str(value).lower()}" for key, value in found.switch.items())
            hint = f"set model.chat_template_options={{{pairs}}}, with which it keeps them, in training and on a server"
            raise ConfigError(f"{chat.where} {found}; {hint}")
        if found:
            return f"{chat.where} {found}. A server that renders the history shows the policy other prompts than these"
    return None


def rewriting(chat: ChatTemplate, following: Sequence[Message]) -> Rewriting | None:
    """How the chat template changes turns that these messages follow; None if it leaves all as they are."""
    found = _change(chat, following)
    if found is None:
        return None
    variants = ((each, replace(chat, template_options={**chat.template_options, **each})) for each in _SWITCHES)
    switch = next((each for each, switched in variants if _change(switched, following) is None), {})
    return Rewriting(following[0].role, *found, switch)


def _change(chat: ChatTemplate, following: Sequence[Message]) -> tuple[str, str] | None:
    """(the first difference as it was written, as it is later)

    Turns have a thought in a field or in the content, beside text or a call; or none, if the prompt leaves none.
    """
    if not _thinks(chat):
        return _difference(chat, (Message("assistant", _ANSWER),), following)
    opening, closing = thought_marks(chat)
    text, fields = f"{opening}\n{_THOUGHT}\n{closing}\n\n{_ANSWER}", dict.fromkeys(THOUGHT_FIELDS, _THOUGHT)
    call = Message("assistant", "", (_CALL,), calls_in_content=False, template_fields=fields)
    turns = ((Message("assistant", text),), (Message("assistant", _ANSWER, template_fields=fields),), (call, _RESULT))
    shown = [turn for turn in turns if _THOUGHT in _rendered(chat, turn[:1])]
    if not shown:
        return text, _rendered(chat, turns[0])[-_SHOWN:]
    return next((found for turn in shown if (found := _difference(chat, turn, following))), None)


def _rendered(chat: ChatTemplate, turn: Sequence[Message]) -> str:
    """Empty for a turn that the template rejects."""
    with suppress(DataError):
        return chat.rendered((_QUESTION, *turn), (), False)
    return ""


def _difference(chat: ChatTemplate, turn: Sequence[Message], following: Sequence[Message]) -> tuple[str, str] | None:
    """turn: the policy's, and the result of its call, which is left out if results follow anyway"""
    whole, after = _rendered(chat, turn[:1]), turn[:1] if following[0].role == "tool" else turn
    start = len(shared_start(whole, chat.frame.prompt))
    ends = [whole.rfind(str(chat.tokenizer.decode([stop])), start) for stop in chat.stop_token_ids]
    written = whole[: max(ends)] if max(ends) >= 0 else whole
    with suppress(DataError):
        later = chat.rendered((_QUESTION, *after, *following))
        if not later.startswith(written.rstrip("\n")):
            place = len(shared_start(written, later))
            return written[place : place + _SHOWN], later[place : place + _SHOWN]
    return None
