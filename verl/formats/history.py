"""Rows under a format with its own prompt: renders earlier calls in that format and checks that nothing is dropped."""

from collections.abc import Sequence
from dataclasses import replace

from verl.errors import ConfigError, DataError
from verl.formats.base import ToolCallFormat
from verl.formats.inline import InlineFormat
from verl.formats.prompt import TOOLS, PromptTemplateMixin
from verl.formats.toolrl_text import listed_tools
from verl.types import Message, ToolSpec

_HINT = "Change the messages, or choose another env.tool_call_format"
_REWRITTEN = ("system", "user", "assistant", "tool")  # roles that formats render themselves


def with_calls_written(tool_call_format: ToolCallFormat, messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages with all calls rendered into the content, and with tool names in all results.

    Raises DataError if the format cannot render calls of earlier turns.
    """
    names: dict[str, str] = {}
    found = []
    for number, message in enumerate(messages):
        names |= {call.id: call.name for call in message.tool_calls if call.id is not None}
        if message.tool_calls and not message.calls_in_content:
            if isinstance(tool_call_format, InlineFormat) or not hasattr(tool_call_format, "render"):
                raise DataError(
                    "cannot be rendered by this env.tool_call_format: its calls are not separate turns",
                    hint=_HINT,
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
    """Raises DataError if the format's prompt drops parts of a row, ConfigError if it does not list the tools.

    messages: result of `with_calls_written`; shown: result of `render_prompt`
    """
    for number, message in enumerate(messages):
        field = f"prompt[{number}]"
        if isinstance(shown, str):
            if message.role in ("assistant", "tool"):
                raise DataError("cannot be part of a prompt without a chat template", hint=_HINT, field=field)
        elif message not in shown:
            if message.role not in _REWRITTEN:
                raise DataError(
                    f"{message.role!r} is not supported by this env.tool_call_format", hint=_HINT, field=f"{field}.role"
                )
            for key in message.template_fields:
                raise DataError("is dropped by this env.tool_call_format", hint=_HINT, field=f"{field}.{key}")
    names = [tool.name for tool in tools]
    own = listed_tools(messages)
    if own is not None and tuple(shown) == tuple(messages) and (lacking := [name for name in names if name not in own]):
        raise DataError(
            f"lists its own tools, but not {', '.join(lacking)}, which is given as well",
            "one list of tools",
            "Remove it from the messages, or give no other tools (column tools, env.tools, tools of a request)",
            field="prompt",
        )
    # the prompt of an inline format may describe its tool under any name, and so may a user-defined format
    prompt = (
        None
        if isinstance(tool_call_format, InlineFormat) or not isinstance(tool_call_format, PromptTemplateMixin)
        else tool_call_format.prompt
    )
    if names and prompt is not None and TOOLS not in prompt.text:
        raise ConfigError(
            f"the prompt template of env.tool_call_format does not list tools, so the policy would not know "
            f"{', '.join(names)}; add {TOOLS} to it, or choose another"
        )
