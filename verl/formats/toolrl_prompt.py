"""Extracts the tools that a ToolRL prompt lists."""

from __future__ import annotations

import re
from collections.abc import Iterable

from verl.types import Message

TOOLS_HEADING = "**Available Tools**"
_ENTRY = re.compile(r"^\d+\. Name:(.*)$", re.MULTILINE)


def listed_tools(prompt: Iterable[Message]) -> tuple[str, ...] | None:
    """Names, stripped, in the order of the numbered list; None if no system message has ToolRL's tools heading."""
    for message in prompt:
        if message.role == "system" and TOOLS_HEADING in message.content:
            return tuple(name.strip() for name in _ENTRY.findall(message.content.partition(TOOLS_HEADING)[2]))
    return None
