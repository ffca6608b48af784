"""Single decisions in Tool-N1's format, from xLAM, ToolACE and ShareGPT files.

    python scripts/data/tool_n1.py --input xlam.json --input toolace.json --output dataset/tool_n1/train.parquet \\
        --test-fraction 0.1 --skip-bad-rows

Every turn with tool calls becomes a row with the preceding dialogue. Rows with unreadable gold calls, or calls of
unlisted tools, are bad rows. The split is seeded, unlike the published one. Formats:

    xLAM       {query, tools, answers}
    ToolACE    {system: text with a JSON list of functions, conversations: [{from: user | assistant | tool, value}]}
    ShareGPT   {tools, conversations: [{from: human | gpt | function_call | observation, value}]}, optional system
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout that is not installed, too

from scripts.data.common import Row, parser, run, task
from scripts.raw.toolace import read_calls
from verl.errors import DataError
from verl.formats.prompt import load_template
from verl.json_values import read_json

Calls = list[dict[str, Any]]

_ROLES = {"user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "function_call": "assistant"}
_ROLES |= {"tool": "tool", "observation": "tool"}


def instruction(tools: Sequence[Any], preface: str = "", template: str = "tool_n1") -> str:
    """The system message: the source's text, the tools, and the calling instructions."""
    lines = "\n".join(json.dumps({"type": "function", "function": tool}, ensure_ascii=False) for tool in tools)
    return f"{preface}\n\n{load_template(template, '{tools}').fill('', lines)}".strip()


def convert(row: Any, arguments: argparse.Namespace) -> Iterator[Row]:
    """A task for every turn with tool calls."""
    if "answers" in row:
        tools = _json(row["tools"], "tools")
        yield _decision(
            tools, "", [{"role": "user", "content": row["query"]}], _calls(_json(row["answers"], "answers"))
        )
        return
    system = row.get("system") or ""
    if row.get("tools"):
        tools, preface = _json(row["tools"], "tools"), system
    else:
        start = system.find("[{")
        if start < 0:
            raise DataError("lists no functions", "a JSON list of functions", field="system")
        tools, preface = json.JSONDecoder().raw_decode(system, start)[0], ""
    names = [tool["name"] for tool in tools]
    before: list[dict[str, str]] = []
    for turn in row["conversations"]:
        speaker, content = turn["from"], turn["value"]
        if speaker not in _ROLES:
            raise DataError(f"has a turn from {speaker!r}", f"one of {', '.join(_ROLES)}", field="conversations")
        calls = None
        if speaker == "function_call":
            found = _json(content, "conversations")
            calls = _calls(found if isinstance(found, list) else [found])
        elif speaker == "assistant" and (read := read_calls(content.strip(), names)):
            calls = _calls(read)
        if calls:
            yield _decision(tools, preface, before, calls)
            content = f"<tool_call>{json.dumps(calls, ensure_ascii=False)}</tool_call>"
        before.append({"role": _ROLES[speaker], "content": content})


def _decision(tools: Any, preface: str, before: Sequence[dict[str, str]], calls: Calls) -> Row:
    if not tools or not calls:
        raise DataError("offers no tool, or calls none")
    offered = {tool["name"] for tool in tools}
    unknown = [call["name"] for call in calls if call["name"] not in offered]
    if unknown:
        raise DataError("calls a tool that is not offered", "one of those listed")
    system = {"role": "system", "content": instruction(tools, preface)}
    return task("toolcall", "tool", [system, *before], json.dumps(calls, ensure_ascii=False), "")


def _calls(found: Any) -> Calls:
    calls = []
    for call in found:
        name = call.get("name", call.get("tool"))  # Seal-Tools uses the key tool
        arguments = call["arguments"] if "arguments" in call else call["parameters"]
        arguments = _json(arguments, "arguments")
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise DataError("has a call without a name or an object of arguments")
        calls.append({"name": name, "arguments": arguments})
    return calls


def _json(value: Any, field: str) -> Any:
    try:
        return read_json(value) if isinstance(value, str) else value
    except ValueError as error:
        raise DataError("is not JSON", "JSON", field=field) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run the conversion; returns the exit code."""
    return run(parser(__doc__).parse_args(argv), convert)


if __name__ == "__main__":
    sys.exit(main())
