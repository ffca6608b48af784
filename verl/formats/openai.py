"""Chat messages in OpenAI's format: what chat templates and other trainers' functions take."""

from typing import Any

from verl.types import Message


def as_openai(message: Message) -> dict[str, Any]:
    """The message in OpenAI's format, as chat templates expect it, with `arguments` as an object.

    Calls that are part of the content are omitted; otherwise the template would write them twice.
    """
    made: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls and not message.calls_in_content:
        made["tool_calls"] = [
            ({} if call.id is None else {"id": call.id})
            | {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    if message.tool is not None:
        made["name"] = message.tool
    return made | dict(message.template_fields)
