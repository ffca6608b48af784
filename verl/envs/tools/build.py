"""Names to tools: what a configuration lists becomes what the policy can call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import isfunction, signature
from typing import Any

from verl.envs.tools.base import EpisodeTool, Tool, Toolset
from verl.errors import ConfigError
from verl.registry import resolve
from verl.sandbox.base import Sandbox

TOOLS: Mapping[str, str] = {
    "calculator": "verl.envs.tools.calculator:calculator",
    "mcp": "verl.envs.tools.mcp:McpServer",
    "python": "verl.envs.tools.python:PythonTool",
    "python_session": "verl.envs.tools.python:PythonSessions",
    "search": "verl.envs.tools.search:SearchTool",
    "shell": "verl.envs.tools.shell:ShellTool",
}


def build_tools(wanted: Sequence[str | Mapping[str, Any]], sandbox: Sandbox | None = None) -> list[Tool | EpisodeTool]:
    """The tools of a run.

    wanted:  for each a name, or a mapping of `name` and its options: `calculator`, `{"name": "search", "corpus": ..}`.
             A user's own is named as `package.module:attribute` or `path/to/file.py:attribute`: a typed function (@tool
             or not) or a class
    sandbox: for those that run code

    Raises ConfigError for an unknown name, wrong options, or a package or sandbox that is missing.
    """
    tools: list[Tool | EpisodeTool] = []
    for one in wanted:
        entry = {"name": one} if isinstance(one, str) else dict(one)
        if not isinstance(entry.get("name"), str):
            raise ConfigError(f"tools: {entry} has no `name`; known are {', '.join(TOOLS)}")
        name = entry.pop("name")
        made = _make(name, entry, sandbox)
        for tool in made.tools if isinstance(made, Toolset) else [made]:
            if not isinstance(tool, Tool | EpisodeTool):
                raise ConfigError(f"{name!r} is no tool, but an object of {type(tool).__name__}")
            tools.append(tool)
    return tools


def _make(name: str, options: Mapping[str, Any], sandbox: Sandbox | None) -> object:
    found = resolve("tool", name, TOOLS)
    if isinstance(found, type):
        return _instance(name, found, options, sandbox)
    if options:
        raise ConfigError(f"tool {name!r} is not a class and takes no options, but got {sorted(options)}")
    if isfunction(found):
        from verl.envs.tools.function import FunctionTool  # where no function is a tool, pydantic is not needed

        return FunctionTool(found)
    return found


def _instance(name: str, made_by: type, options: Mapping[str, Any], sandbox: Sandbox | None) -> object:
    given = dict(options)
    if "sandbox" in signature(made_by).parameters:
        if sandbox is None:
            raise ConfigError(f"tool {name!r} runs code and needs a sandbox")
        given["sandbox"] = sandbox
    try:
        signature(made_by).bind(**given)
    except TypeError as error:
        takes = [parameter for parameter in signature(made_by).parameters if parameter != "sandbox"]
        raise ConfigError(f"tool {name!r}: {error}; its options are {', '.join(takes) or 'none'}") from error
    return made_by(**given)
