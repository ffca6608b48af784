"""Builds raw examples {"instruction", "input", "output"}, one per decision in a dialogue."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from scripts.raw.rlla import CALL_THOUGHT, RESPONSE_THOUGHT, ListedTool, check_example, tool_list
from verl.data.rows import read_rows
from verl.errors import DataError
from verl.formats.toolrl_text import TOOLS_HEADING, render_response

Instruction = Callable[[Sequence[ListedTool]], str]


@cache
def _own_wording() -> str:
    return Path(__file__).with_name("instruction.txt").read_text(encoding="utf-8").rstrip("\n")


def own_instruction(tools: Sequence[ListedTool]) -> str:
    """The system text in this project's wording."""
    return _own_wording().replace("{tools}", tool_list(tools))


def instruction_like(source: str) -> Instruction:
    """The system text in the wording of a published raw file, with its tool list replaced."""
    try:
        sample = check_example(next(read_rows(source), None))["instruction"]
    except DataError as error:
        raise error.at(file=source, row=0) from error
    head, heading, rest = sample.partition(TOOLS_HEADING)
    _, gap, tail = rest.partition("\n\n")
    if not heading or not gap:
        raise DataError(
            "has no tool list to replace",
            f"a {TOOLS_HEADING} section, ended by an empty line",
            "Name a file of ToolRL's raw form",
            file=source,
            row=0,
        )
    return lambda tools: f"{head}{tool_list(tools)}\n\n{tail}"


def to_response(calls: Sequence[dict[str, Any]] | None, response: str | None) -> str:
    """An assistant turn with the placeholder thought of ToolRL's RL rows."""
    return render_response(CALL_THOUGHT if calls else RESPONSE_THOUGHT, calls or None, response)


def to_tool(function: Mapping[str, Any]) -> ListedTool:
    """A function in ToolRL's list format. Raises DataError if the name is not a text."""
    name = function["name"]
    if not isinstance(name, str) or not name.strip():
        raise DataError("has a name that is not a text", field="tools")
    return ListedTool(
        name.strip(), str(function.get("description") or ""), flat_parameters(function.get("parameters") or {})
    )


def flat_parameters(parameters: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """{name: {description, type, default}} of a JSON schema object or an already flat map."""
    is_schema = isinstance(parameters.get("type"), str) and isinstance(parameters.get("properties"), Mapping)
    properties = parameters["properties"] if is_schema else parameters
    return {
        name: {
            "description": about.get("description", ""),
            "type": about.get("type", "string"),
            "default": about.get("default", ""),
        }
        for name, about in properties.items()
        if isinstance(about, Mapping)
    }
