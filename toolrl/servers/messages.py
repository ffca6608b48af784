"""Messages of the policy as JSON of a protocol."""

import json
from dataclasses import replace
from typing import Any

from verl.text import utf8
from verl.types import Message


def sendable(message: Message) -> Message:
    """The message with lone surrogates replaced: a policy may call a tool with half a character ("\\ud83d")."""

    def clean(value: Any) -> Any:
        return json.loads(utf8(json.dumps(value, ensure_ascii=False)))

    calls = [replace(call, name=utf8(call.name), arguments=clean(dict(call.arguments))) for call in message.tool_calls]
    return replace(message, content=utf8(message.content), tool_calls=tuple(calls))
