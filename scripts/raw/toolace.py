"""ToolACE (Team-ACE/ToolACE): whole dialogues, split into one example per turn of the assistant.

    {"system": text with a JSON list of functions, "conversations": [{"from": user | assistant | tool, "value": text}]}

The assistant calls as `[Function Name(key="value", other=1), ...]`, where names may hold spaces.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from typing import Any

from scripts.raw.decision import Instruction, flat_parameters, to_reply
from verl.data.rlla import Tool, dialogue, observation
from verl.errors import DataError


def decisions(row: Any, instruction: Instruction) -> Iterator[dict[str, str]]:
    """One example per assistant turn, each with all that came before it. Raises DataError for a row of another form."""
    for name in ("system", "conversations"):
        if not isinstance(row, dict) or name not in row:
            raise DataError("is missing", "system and conversations, as ToolACE has them", field=name)
    system = instruction(listed_functions(row["system"]))
    turns: list[str] = []
    for number, turn in enumerate(row["conversations"]):
        if not isinstance(turn, dict) or turn.keys() < {"from", "value"}:
            raise DataError("is not a turn", "an object {from, value}", field=f"conversations[{number}]")
        speaker, said = turn["from"], turn["value"].strip()
        if speaker == "user":
            turns.append(f"<user> {said} </user>")
        elif speaker == "assistant":
            calls = parse_calls(said)
            reply = to_reply(calls, None if calls else said)
            yield {"instruction": system, "input": dialogue(turns), "output": reply}
            turns.append(reply)
        elif speaker == "tool" and turns:
            turns[-1] += f"\n{_observed(said)}"  # feedback follows its call without an empty line
        else:
            raise DataError(
                f"is from {speaker!r}", "user, assistant, or tool after a call", field=f"conversations[{number}]"
            )


def listed_functions(system: str) -> list[Tool]:
    """The functions in ToolACE's system text: the first JSON list of objects in it."""
    decoder = json.JSONDecoder()
    start = system.find("[{")
    if start < 0:
        raise DataError("lists no functions", "a JSON list of functions", field="system")
    try:
        functions, _ = decoder.raw_decode(system, start)
        return [
            Tool(item["name"], item.get("description", ""), flat_parameters(item.get("parameters") or {}))
            for item in functions
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"has a list of functions that cannot be read ({error!r})", field="system") from error


def _observed(said: str) -> str:
    try:
        results = json.loads(said)
    except ValueError:
        return observation([{"name": "tool", "results": said}])
    return observation(results if isinstance(results, list) else [results])


def parse_calls(text: str) -> list[dict[str, Any]] | None:
    """The calls of `[Name(key=value, ..), ..]`; None where the text is anything else, an answer in words."""
    if not (text.startswith("[") and text.endswith("]")):
        return None
    calls, rest = [], text[1:-1].strip()
    while rest:
        name, bracket, after = rest.partition("(")
        end = _closing(after) if bracket else None
        if end is None or not name.strip():
            return None
        parameters = _keywords(after[:end])
        if parameters is None:
            return None
        calls.append({"name": name.strip(), "parameters": parameters})
        rest = after[end + 1 :].lstrip()
        if rest and not rest.startswith(","):
            return None
        rest = rest[1:].lstrip()
    return calls or None


def _closing(text: str) -> int | None:
    """Where the bracket that is open before `text` closes, quotes and nested brackets skipped."""
    depth, quote, skip = 1, "", False
    for position, letter in enumerate(text):
        if skip:
            skip = False
        elif quote:
            skip = letter == "\\"
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
            if not depth:
                return position
    return None


def _keywords(arguments: str) -> dict[str, Any] | None:
    words = {"true": "True", "false": "False", "null": "None"}
    try:
        call = ast.parse(f"f({arguments})", mode="eval").body
        assert isinstance(call, ast.Call)
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            return None
        literals = {}
        for keyword in call.keywords:
            value = keyword.value
            if isinstance(value, ast.Name) and value.id in words:
                value = ast.parse(words[value.id], mode="eval").body
            literals[str(keyword.arg)] = ast.literal_eval(value)
        json.dumps(literals)  # sets, bytes and complex numbers are no JSON
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return literals
