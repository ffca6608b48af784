"""Handlers: the prompt format in which tools are listed and calls are parsed.

A model's score depends on the handler, so every score names its handler, and comparisons use the same one.
"""

from dataclasses import replace

from toolrl.benchmarks.runner.benchmark import EpisodeConfig
from verl.chat.native import own_format
from verl.config.schema import EnvConfig
from verl.errors import ConfigError
from verl.formats.base import TOOL_CALL_FORMATS, build_tool_call_format
from verl.formats.inline import InlineFormat
from verl.registry import nearest


def tool_call_format_of(handler: str, chat_template: str) -> str:
    """The format of this name; for `native`, the chat template's. Raises ConfigError if there is none."""
    if handler != "native":
        if handler not in TOOL_CALL_FORMATS and ":" not in handler:
            raise ConfigError(f"unknown handler {handler!r}; {nearest(handler, ['native', *TOOL_CALL_FORMATS])}")
        return handler
    if (own := own_format(chat_template)) is not None:
        return own
    hint = "choose eval.handler=toolrl, eval.handler=tool_n1 or another format of docs/tool_call_formats.md"
    raise ConfigError(f"eval.handler=native: the model's chat template has no known tool format; {hint}")


def check_several_tools(benchmark: str, tool_call_format: str) -> None:
    """Raises ConfigError for a single-tool format, which lists no tools. "": the format is not known yet."""
    if tool_call_format and isinstance(build_tool_call_format(tool_call_format), InlineFormat):
        problem = f"the tool-call format {tool_call_format!r} supports a single tool only"
        raise ConfigError(f"{benchmark}: {problem}; use another handler")


def env_of(episode: EpisodeConfig, tool_call_format: str) -> EnvConfig:
    """The `env` configuration of a category under a handler's format."""
    if episode.own_env is not None:
        return replace(episode.own_env, tool_call_format=tool_call_format)
    if not episode.uses_tools:
        return EnvConfig()
    return EnvConfig(
        name=episode.env,
        options=dict(episode.options),
        tool_call_format=tool_call_format,
        tools=list(episode.tools),
        max_turns=episode.max_turns,
        max_tool_calls=episode.max_tool_calls,
        max_observation_tokens=episode.max_observation_tokens,
        on_parse_error="feedback" if episode.feedback_on_parse_error else "terminate",
    )
