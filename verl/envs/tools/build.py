"""Builds the tools listed in the configuration."""

from collections.abc import Mapping, Sequence
from inspect import isfunction, ismethod, signature
from typing import Any

from verl.envs.sandbox import Sandbox
from verl.envs.tools.base import EpisodeTool, Tool
from verl.envs.tools.function import FunctionTool
from verl.errors import ConfigError
from verl.plugins import TOOLS
from verl.registry import check_options, resolve


def build_tools(wanted: Sequence[str | Mapping[str, Any]], sandbox: Sandbox | None = None) -> list[Tool | EpisodeTool]:
    """The tools of a run.

    wanted:  names, or mappings of `name` and options, such as `{"name": "search", "corpus": ..}`; your own tool is
             `package.module:attribute` or `path/to/file.py:attribute`: a typed function or method (@tool or not), or a
             class
    sandbox: for tools that run code

    Raises ConfigError for an unknown name, invalid options, or a missing package or sandbox.
    """
    tools: list[Tool | EpisodeTool] = []
    for one in wanted:
        name = tool_name(one)
        options = {} if isinstance(one, str) else {key: value for key, value in one.items() if key != "name"}
        made = _make(name, options, sandbox)
        for tool in getattr(made, "tools", [made]):  # several tools from one source, such as a server
            if not isinstance(tool, Tool | EpisodeTool):
                raise ConfigError(f"{name!r} is not a tool, but an object of {type(tool).__name__}")
            tools.append(tool)
    return tools


def tool_name(wanted: Any) -> str:
    """The name in an entry of `wanted`, which is user input. Raises ConfigError for an invalid entry."""
    name = wanted.get("name") if isinstance(wanted, Mapping) else wanted
    if not isinstance(name, str):
        hint = f"use a name, or {{name: NAME, option: value}}. Known tools: {', '.join(TOOLS)}"
        raise ConfigError(f"env.tools: {wanted!r} is not a tool; {hint}")
    return name


def _make(name: str, options: Mapping[str, Any], sandbox: Sandbox | None) -> object:
    found = resolve("tool", name, TOOLS)
    if isinstance(found, type):
        shared = {"sandbox": sandbox} if "sandbox" in signature(found).parameters else {}
        if shared and sandbox is None:
            raise ConfigError(f"tool {name!r} runs code and needs a sandbox")
        check_options("tool", name, found, options, **shared)
        return found(**shared, **options)
    if options:
        raise ConfigError(f"tool {name!r} is not a class and takes no options, but got {sorted(options)}")
    return FunctionTool(found) if isfunction(found) or ismethod(found) else found
