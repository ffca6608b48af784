"""Where a chat template takes earlier thoughts from, so that a server shows them as the policy wrote them.

Clients send a thought back in the content, as our server answered it, or in a field. A chat template may read another
place: those of Qwen 3.8 and Gemma 4 read a field alone, that of Nemotron 3 a content in which the thought is opened.
`templates/thoughts.jinja` moves it there.
"""

from __future__ import annotations

from contextlib import suppress

from verl.chat.history import THOUGHT_FIELDS, thought_marks
from verl.chat.template import ChatTemplate
from verl.errors import DataError
from verl.formats.jinja import literal
from verl.types import Message, ToolCall

_QUESTION, _ID, _THOUGHT = Message("user", "a"), "call00000", "Hm."
_CALL, _RESULT = ToolCall("trial", {"text": "b"}, _ID), Message("tool", "7", tool="trial", tool_call_id=_ID)


def thought_places(chat: ChatTemplate) -> str:
    """The variables of templates/thoughts.jinja as Jinja; empty for a template that shows no thoughts of its own.

    opening, closing: around a thought; opened: what prompts have of it, some only after results
    in_field: whether a thought is shown as it was written if it is in a field, but not if it is in the content
    """
    opening, closing = thought_marks(chat)
    shown = _call(chat, "", _THOUGHT)
    prompts = (prompt for prompt in (shown, chat.frame.prompt) if prompt.rstrip().endswith(opening))
    opened = next((prompt[prompt.rindex(opening) :] for prompt in prompts), "")
    reads_fields = closing in shown and _THOUGHT in shown
    if not opened and not reads_fields:
        return ""
    start = shown.rfind(opening, 0, shown.find(_THOUGHT) + 1)
    written = shown[max(start, 0) : shown.find(closing, start) + len(closing)]
    in_field = reads_fields and _call(chat, written) != shown
    places = {"opening": opening, "closing": closing, "opened": opened, "in_field": in_field}
    return f"{{%- set given.thoughts = {literal(places)} -%}}"


def _call(chat: ChatTemplate, content: str, thought: str | None = None) -> str:
    """A call with this content, and with this thought in all fields, and its result; empty if that is rejected."""
    fields = {} if thought is None else dict.fromkeys(THOUGHT_FIELDS, thought)
    call = Message("assistant", content, (_CALL,), calls_in_content=False, template_fields=fields)
    with suppress(DataError):
        return chat.rendered((_QUESTION, call, _RESULT))
    return ""
