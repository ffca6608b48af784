"""Rows of ToolRL's form as OpenAI's: {"messages": [..], "tools": [..]}, one conversation a line.

    python scripts/data/openai_rows.py --input embedded:train.parquet --output mine.jsonl

The listed tools become function schemas, the dialogue history messages, and the gold answer the last assistant turn.
Thoughts are left out: they are the policy's own.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout that is not installed, too

from rich.console import Console

from verl.data.rows import read_rows
from verl.data.source import source_name
from verl.data.tasks import to_task
from verl.embedded import embedded_path
from verl.errors import VerlError
from verl.formats.toolrl_text import parse_calls
from verl.host.exits import write_error
from verl.host.files import ending_in, replacing
from verl.types import Task

_TOOL = re.compile(r"^\d+\. Name: (.*)\nDescription: (.*)\nParameters: (.*)$", re.MULTILINE)
_PIECE = re.compile(
    r"<(?P<tag>user|obs|response)> ?(?P<text>.*?) ?</(?P=tag)>|<tool_call>\n(?P<calls>.*?)\n</tool_call>", re.DOTALL
)
_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}


def convert(task: Task) -> dict[str, Any]:
    system, *dialogue = (message.content for message in task.prompt)
    tools = [_tool(*found) for found in _TOOL.findall(system)]
    return {"messages": list(_messages("\n".join([*dialogue, task.answer]))), "tools": tools}


def _tool(name: str, description: str, parameters: str) -> dict[str, Any]:
    properties = {
        key: {"type": _TYPES.get(about["type"], about["type"]), "description": about["description"]}
        for key, about in json.loads(parameters).items()
    }
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def _messages(text: str) -> Iterator[dict[str, Any]]:
    """The turns of a history and a gold answer."""
    names: list[str] = []
    for piece in _PIECE.finditer(text):
        if piece["calls"] is not None:
            calls = parse_calls(piece["calls"])
            names = [call["name"] for call in calls]
            yield {"role": "assistant", "content": None, "tool_calls": list(map(_call, calls))}
        elif piece["tag"] == "obs":
            for name, result in zip(names, json.loads(piece["text"]), strict=True):
                yield {"role": "tool", "name": name, "content": json.dumps(result["results"])}
        else:
            yield {"role": "user" if piece["tag"] == "user" else "assistant", "content": piece["text"]}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": call["name"], "arguments": json.dumps(call["parameters"])}}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the rows; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--input", required=True, metavar="FILE", help="rows of ToolRL's form, such as embedded:train.parquet"
    )
    parser.add_argument("--output", required=True, type=ending_in(".jsonl"), metavar="FILE.jsonl")
    parser.add_argument("--limit", type=int, metavar="N", help="the first N rows; default: all")
    arguments = parser.parse_args(argv)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        source = embedded_path(arguments.input)
        rows = islice(read_rows(source), arguments.limit)
        converted = [convert(to_task(row, f"{source_name(source)}#{number}")) for number, row in enumerate(rows)]
    except VerlError as error:
        return write_error(error)
    with replacing(arguments.output) as unfinished:
        unfinished.write_text(
            "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in converted), encoding="utf-8"
        )
    console.print(f"{arguments.output}: {len(converted)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
