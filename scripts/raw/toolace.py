"""ToolACE (Team-ACE/ToolACE): whole dialogues, split into one example per assistant turn.

    {"system": text with a JSON list of functions, "conversations": [{"from": user | assistant | tool, "value": text}]}

The assistant calls as `[Function Name(key="value", other=1), ...]`, where names may hold spaces.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from scripts.raw.decision import Instruction, to_response, to_tool
from scripts.raw.rlla import ListedTool, dialogue, observation
from verl.errors import DataError

_LOOKS_LIKE_CALLS = re.compile(r"\[.*\(.*\)\s*\]", re.DOTALL)
# the name may contain brackets only if another pair follows: `Get Weather (v2)(city="x")`
_CALL = re.compile(r"(?P<name>[^()=,\[\]]+(?:\([^()=]*\)(?=\())?)\((?P<arguments>.*)\)", re.DOTALL)
_JSON_CONSTANTS = {"true": True, "false": False, "null": None}


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
    if not _LOOKS_LIKE_CALLS.fullmatch(content):
        return None
    calls = parse_calls(content)
    if calls is None or any(call["name"] not in known for call in calls):
        raise DataError("has calls that cannot be read, or of functions that are not listed", field="conversations")
    return calls


def parse_calls(text: str) -> list[dict[str, Any]] | None:
    """The calls of `[Name(key=value, ..), ..]`; None if the text has another format."""
    pieces = _split(text[1:-1])
    if pieces is None:
        return None
    calls = []
    for piece in pieces:
        call = _CALL.fullmatch(piece.strip())
        arguments = _arguments(call["arguments"]) if call else None
        if call is None or arguments is None:
            return None
        calls.append({"name": call["name"].strip(), "parameters": arguments})
    return calls or None


def _arguments(text: str) -> dict[str, Any] | None:
    """{key: value} of `key=value, ..`; keys may be Python keywords, values are Python or JSON literals."""
    pieces = _split(text) if text.strip() else []
    if pieces is None:
        return None
    arguments = {}
    for piece in pieces:
        key, equals, literal = piece.partition("=")
        try:
            value = _literal(literal.strip())
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return None
        if not equals or not re.fullmatch(r"[\w.-]+", key.strip()):
            return None
        arguments[key.strip()] = value
    return arguments


def _literal(text: str) -> Any:
    """A Python literal that may contain JSON's true, false and null. Raises ValueError or SyntaxError."""
    try:
        tree = ast.parse(f"({text})", mode="eval")
    except SyntaxError:
        tree = ast.parse(text.replace("\n", "\\n"), mode="eval")  # a line break inside a string
    value = _value(tree.body)
    json.dumps(value, allow_nan=False)  # rejects infinities and sets
    return value


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _JSON_CONSTANTS:
        return _JSON_CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        if None in node.keys:
            raise ValueError("unpacking is not a literal")
        return {_value(key): _value(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    return ast.literal_eval(node)


def _split(text: str) -> list[str] | None:
    """The text split at commas outside of quotes and brackets; None for an unclosed quote or bracket."""
    pieces, start, closers, quote, skip = [], 0, [], "", False
    for position, letter in enumerate(text):
        if skip:
            skip = False
        elif quote:
            skip = letter == "\\"
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "([{":
            closers.append({"(": ")", "[": "]", "{": "}"}[letter])
        elif letter in ")]}":
            if not closers or closers.pop() != letter:
                return None
        elif letter == "," and not closers:
            pieces.append(text[start:position])
            start = position + 1
    return None if quote or closers else [*pieces, text[start:]]
