"""ToolACE (Team-ACE/ToolACE): whole dialogues, split into one example per assistant turn.

    {"system": text with a JSON list of functions, "conversations": [{"from": user | assistant | tool, "value": text}]}

The assistant calls as `[Function Name(key="value", other=1), ...]`, where names may hold spaces.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from scripts.raw.decision import Instruction, to_response, to_tool
from scripts.raw.rlla import ListedTool, dialogue, observation
from toolrl.layouts.python_calls import looks_like_calls, parse_calls
from verl.errors import DataError


def decisions(row: Any, instruction: Instruction) -> Iterator[dict[str, str]]:
    """One example per assistant turn, with the preceding dialogue. Raises DataError for a row in another format.

    A severely malformed row may also raise KeyError, TypeError, AttributeError, ValueError or RecursionError.
    """
    for name in ("system", "conversations"):
        if not isinstance(row, dict) or name not in row:
            raise DataError("is missing", "system and conversations, as ToolACE has them", field=name)
    tools = listed_functions(row["system"])
    system = instruction(tools)
    turns: list[str] = []
    for turn in row["conversations"]:
        speaker, content = turn["from"], turn["value"].strip()
        if speaker == "user":
            turns.append(f"<user> {content} </user>")
        elif speaker == "assistant":
            calls = read_calls(content, [tool.name for tool in tools])
            response = to_response(calls, None if calls else content)
            yield {"instruction": system, "input": dialogue(turns), "output": response}
            turns.append(response)
        elif speaker == "tool" and turns:
            turns[-1] += f"\n{_observed(content)}"  # feedback follows its call without an empty line
        else:
            raise DataError("has a turn that is not user, assistant, or tool after a call", field="conversations")


def listed_functions(system: str) -> list[ListedTool]:
    """The functions in ToolACE's system text: the first JSON list of objects in it."""
    start = system.find("[{")
    if start < 0:
        raise DataError("lists no functions", "a JSON list of functions", field="system")
    functions, _ = json.JSONDecoder().raw_decode(system, start)
    return [to_tool(function) for function in functions]


def _observed(content: str) -> str:
    try:
        results = json.loads(content)
    except ValueError:
        return observation([{"name": "tool", "results": content}])
    return observation(results if isinstance(results, list) else [results])


def read_calls(content: str, known: Sequence[str]) -> list[dict[str, Any]] | None:
    """The calls of an assistant turn; None for a text answer.

    Raises DataError for malformed calls and unknown functions, which are neither valid calls nor answers.
    """
    if not looks_like_calls(content):
        return None
    calls = parse_calls(content)
    if calls is None or any(name not in known for name, _ in calls):
        raise DataError("has calls that cannot be read, or of functions that are not listed", field="conversations")
    return [{"name": name, "parameters": arguments} for name, arguments in calls]
