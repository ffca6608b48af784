"""xLAM (Salesforce/xlam-function-calling-60k) and data in its format, such as Hammer's: one query, one decision.

    {"query": text, "tools": [{name, description, parameters}], "answers": [{name, arguments}]}

Tools and answers may be JSON strings. With `mask`, function and parameter names become random strings, as in Hammer
(arXiv 2410.04587), so that the policy must read the descriptions.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from scripts.raw.decision import Instruction, to_response, to_tool
from scripts.raw.rlla import ListedTool, dialogue
from verl.errors import DataError
from verl.json_values import read_json

Calls = list[dict[str, Any]]
Mask = Callable[[list[ListedTool], Calls], tuple[list[ListedTool], Calls]]


def decisions(row: Any, instruction: Instruction, mask: Mask | None = None) -> Iterator[dict[str, str]]:
    """The example of a row; none if the row has no call. Raises DataError for a row in another format.

    A severely malformed row may also raise KeyError, TypeError, AttributeError, ValueError or RecursionError.
    """
    for name in ("query", "tools", "answers"):
        if not isinstance(row, dict) or name not in row:
            raise DataError("is missing", "query, tools and answers, as xLAM has them", field=name)
    tools = [to_tool(tool) for tool in _listed(row, "tools")]
    calls = [_call(answer) for answer in _listed(row, "answers")]
    if not calls:
        return
    if mask:
        tools, calls = mask(tools, calls)
    yield {
        "instruction": instruction(tools),
        "input": dialogue([f"<user> {row['query'].strip()} </user>"]),
        "output": to_response(calls, None),
    }


def _call(answer: dict[str, Any]) -> dict[str, Any]:
    parameters = answer["arguments"] if "arguments" in answer else answer.get("parameters", {})
    if not isinstance(parameters, dict):
        raise DataError("has arguments that are not an object", field="answers")
    return {"name": answer["name"].strip(), "parameters": parameters}


def _listed(row: dict[str, Any], name: str) -> list[dict[str, Any]]:
    value = row[name]
    try:
        items = read_json(value) if isinstance(value, str) else value
    except ValueError as error:
        raise DataError(f"is not JSON ({error})", "a list of objects", field=name) from error
    if not isinstance(items, list) or not all(isinstance(item, dict) and "name" in item for item in items):
        raise DataError("is not a list of objects with a name", field=name)
    return items


def masker(generator: random.Random) -> Mask:
    """Masks the names of one row consistently in tools and calls."""

    def mask(tools: list[ListedTool], calls: Calls) -> tuple[list[ListedTool], Calls]:
        if len({tool.name for tool in tools}) < len(tools):
            raise DataError("lists a name twice, so that calls are ambiguous", field="tools")
        taken: set[str] = set()
        names = _random_names((tool.name for tool in tools), generator, taken)
        keys = {tool.name: _random_names(tool.parameters, generator, taken) for tool in tools}
        masked_tools = [
            ListedTool(
                names[tool.name],
                tool.description,
                {keys[tool.name][key]: about for key, about in tool.parameters.items()},
            )
            for tool in tools
        ]
        for call in calls:
            if call["name"] not in names or not call["parameters"].keys() <= keys[call["name"]].keys():
                raise DataError("has calls with unlisted names", field="answers")
        masked_calls = [
            {
                "name": names[call["name"]],
                "parameters": {keys[call["name"]][key]: value for key, value in call["parameters"].items()},
            }
            for call in calls
        ]
        return masked_tools, masked_calls

    return mask


def _random_names(names: Iterable[str], generator: random.Random, taken: set[str]) -> dict[str, str]:
    masks = {}
    for name in names:
        while name not in masks or masks[name] in taken:
            masks[name] = "".join(generator.choices(string.ascii_letters + string.digits, k=generator.randint(4, 10)))
        taken.add(masks[name])
    return masks
