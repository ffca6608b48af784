"""Rows under a format that writes its own prompt: earlier calls in its format, and an error for what it leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from verl.data.formats.base import ToolCallFormat
from verl.data.formats.inline import InlineFormat
from verl.data.formats.prompt import TOOLS, PromptTemplateMixin
from verl.errors import ConfigError, DataError
from verl.types import Message, ToolSpec
from verl.utils.reward_score.prompt import listed_tools

_MEND = "Change the row, or choose another env.tool_call_format"
_REWRITTEN = ("system", "user", "assistant", "tool")  # roles that formats write in their own format


def with_calls_written(tool_call_format: ToolCallFormat, messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages, in which every call stands in its message's content, and every result names its tool.

    Raises DataError for a format that cannot write calls of earlier turns.
    """
    names: dict[str, str] = {}
    found = []
    for number, message in enumerate(messages):
        names |= {call.id: call.name for call in message.tool_calls if call.id is not None}
        if message.tool_calls and not message.calls_in_content:
            if isinstance(tool_call_format, InlineFormat) or not hasattr(tool_call_format, "render"):
                raise DataError(
                    "cannot be written by this env.tool_call_format: its calls are no turns",
                    hint=_MEND,
                    field=f"prompt[{number}].tool_calls",
                )
            content = "\n".join(filter(None, (message.content, tool_call_format.render(message.tool_calls))))
            fields = {key: value for key, value in message.template_fields.items() if key != "content"}
            message = replace(message, content=content, calls_in_content=True, template_fields=fields)
        elif message.role == "tool" and message.tool is None:
            message = replace(message, tool=names.get(message.tool_call_id or ""))
        found.append(message)
    return tuple(found)


def check_shown(
    tool_call_format: ToolCallFormat,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec],
    shown: str | Sequence[Message],
) -> None:
    """Raises DataError for what a format's opening leaves out of a row, ConfigError where it lists no tools.

    messages: of `with_calls_written`. shown: what the format made of them
    """
    for number, message in enumerate(messages):
        field = f"prompt[{number}]"
        if isinstance(shown, str):
            if message.role in ("assistant", "tool"):
                raise DataError("has no place in a prompt without a chat template", hint=_MEND, field=field)
        elif message not in shown:
            if message.role not in _REWRITTEN:
                raise DataError(
                    f"{message.role!r} is unknown to this env.tool_call_format", hint=_MEND, field=f"{field}.role"
                )
            for key in message.template_fields:
                raise DataError("is left out by this env.tool_call_format", hint=_MEND, field=f"{field}.{key}")
    names = [tool.name for tool in tools]
    own = listed_tools(messages)
    if own is not None and tuple(shown) == tuple(messages) and (lacking := [name for name in names if name not in own]):
        raise DataError(
            f"lists its tools itself, and not {', '.join(lacking)}, which the column tools or env.tools offers",
            hint="Give the tools in one place",
            field="prompt",
        )
    # the prompt of a format that pauses may describe its one tool under any name, and so may a user's own format
    prompt = (
        None
        if isinstance(tool_call_format, InlineFormat) or not isinstance(tool_call_format, PromptTemplateMixin)
        else tool_call_format.prompt
    )
    if names and prompt is not None and TOOLS not in prompt.text:
        raise ConfigError(
            f"the prompt template of env.tool_call_format lists no tools, so that the policy would never learn of "
            f"{', '.join(names)}; put {TOOLS} into it, or choose another"
        )
