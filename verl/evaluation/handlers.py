"""A handler: in which words a model is told of tools, and how its calls are read.

The same model scores differently under each, so one belongs to every figure, and models are compared under one alone.
"""

from __future__ import annotations

from verl.config.schema import EnvConfig
from verl.data.codecs.base import CODECS, build_codec
from verl.data.codecs.inline import InlineCodec
from verl.errors import ConfigError
from verl.evaluation.base import Play
from verl.registry import nearest

_NATIVE = {  # what a chat template writes around calls -> the codec that reads them
    "<tool_call>": "hermes",
    "<|python_tag|>": "llama3_json",
    '"parameters": dictionary of argument name and its value': "llama3_json",
}


def codec_of(handler: str, chat_template: str) -> str:
    """The codec that a handler stands for: `native` is that of the chat template, any other its own name.

    Raises ConfigError for an unknown one, and where the chat template tells of no tools in a known way.
    """
    if handler != "native":
        if handler not in CODECS and ":" not in handler:
            raise ConfigError(f"unknown handler {handler!r}; {nearest(handler, ['native', *CODECS])}")
        return handler
    for mark, codec in _NATIVE.items():
        if "tools" in chat_template and mark in chat_template:
            return codec
    raise ConfigError(
        "handler=native: the model's chat template tells of no tools in a way that is known; choose handler=toolrl, "
        "handler=tool_n1 or another codec of docs/codecs.md"
    )


def check_several_tools(benchmark: str, codec: str) -> None:
    """Raises ConfigError for a codec that tells of no tools and writes calls of one alone; "": it is not known yet."""
    if codec and isinstance(build_codec(codec), InlineCodec):
        raise ConfigError(f"{benchmark}: the codec {codec!r} writes calls of one tool alone; use another handler")


def env_of(play: Play, codec: str) -> EnvConfig:
    """How the episodes of a category go under a handler's codec."""
    if not play.handled:
        return EnvConfig()
    return EnvConfig(
        name=play.env,
        options=dict(play.options),
        codec=codec,
        tools=list(play.tools),
        max_turns=play.max_turns,
        max_tool_calls=play.max_tool_calls,
        max_observation_tokens=play.max_observation_tokens,
        on_malformed="tell" if play.tell_malformed else "end",
    )
