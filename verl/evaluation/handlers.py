"""A handler: in which words a model is told of tools, and how its calls are read.

The same model scores differently under each, so one belongs to every figure, and models are compared under one alone.
"""

from __future__ import annotations

from verl.config.schema import EnvConfig
from verl.data.formats.base import TOOL_CALL_FORMATS, build_tool_call_format
from verl.data.formats.inline import InlineFormat
from verl.errors import ConfigError
from verl.evaluation.base import EpisodeConfig
from verl.registry import nearest

_NATIVE = {  # what a chat template writes around calls -> the format that reads them
    "<tool_call>": "hermes",
    "<|python_tag|>": "llama3_json",
    '"parameters": dictionary of argument name and its value': "llama3_json",
}


def tool_call_format_of(handler: str, chat_template: str) -> str:
    """The format that a handler stands for: `native` is that of the chat template, any other its own name.

    Raises ConfigError for an unknown one, and where the chat template tells of no tools in a known way.
    """
    if handler != "native":
        if handler not in TOOL_CALL_FORMATS and ":" not in handler:
            raise ConfigError(f"unknown handler {handler!r}; {nearest(handler, ['native', *TOOL_CALL_FORMATS])}")
        return handler
    for mark, tool_call_format in _NATIVE.items():
        if "tools" in chat_template and mark in chat_template:
            return tool_call_format
    raise ConfigError(
        "handler=native: the model's chat template tells of no tools in a way that is known; choose handler=toolrl, "
        "handler=tool_n1 or another codec of docs/tool_call_formats.md"
    )


def check_several_tools(benchmark: str, tool_call_format: str) -> None:
    """Raises ConfigError for a format that tells of no tools and writes calls of one alone; "": it is not known yet."""
    if tool_call_format and isinstance(build_tool_call_format(tool_call_format), InlineFormat):
        raise ConfigError(
            f"{benchmark}: the codec {tool_call_format!r} writes calls of one tool alone; use another handler"
        )


def env_of(play: EpisodeConfig, tool_call_format: str) -> EnvConfig:
    """How the episodes of a category go under a handler's format."""
    if not play.uses_tools:
        return EnvConfig()
    return EnvConfig(
        name=play.env,
        options=dict(play.options),
        tool_call_format=tool_call_format,
        tools=list(play.tools),
        max_turns=play.max_turns,
        max_tool_calls=play.max_tool_calls,
        max_observation_tokens=play.max_observation_tokens,
        on_parse_error="tell" if play.feedback_on_parse_error else "end",
    )
