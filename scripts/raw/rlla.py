"""ToolRL's row format: the parquet schema, and the text that lists the tools.

A raw example is {"instruction": system text, "input": dialogue so far, "output": gold response}; the trainer reads
rows. See docs/data.md.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from verl.data.tasks import DATA_SOURCE
from verl.errors import DataError
from verl.formats.toolrl_text import THINK, THINK_END, TOOL_CALL, TOOLS_HEADING

RAW_FIELDS = ("instruction", "input", "output")

# The schema of the published parquet files, field for field.
SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("content", pa.string()), ("role", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("ground_truth", pa.string()), ("style", pa.string())])),
        (
            "extra_info",
            pa.struct(
                [
                    ("index", pa.int64()),
                    ("input", pa.string()),
                    ("instruction", pa.string()),
                    ("output", pa.string()),
                    ("split", pa.string()),
                ]
            ),
        ),
    ]
)

_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")

# Placeholder thoughts in ToolRL's RL rows.
CALL_THOUGHT = "I should use the appropriate tool with proper parameters to respond to the user's need."
RESPONSE_THOUGHT = "I should directly respond to the user's need."


def check_example(example: Any) -> dict[str, str]:
    """The three texts of a raw example. Raises DataError naming a field that is missing, empty or not a text."""
    if isinstance(example, DataError):
        raise example  # an undecodable line
    if not isinstance(example, dict):
        raise DataError(f"is of type {type(example).__name__}", f"an object with {', '.join(RAW_FIELDS)}")
    for name in RAW_FIELDS:
        if not isinstance(example.get(name), str):
            problem = "is missing" if name not in example else f"is of type {type(example[name]).__name__}"
            raise DataError(problem, "a text", field=name)
        if not example[name].strip():
            raise DataError("is empty", "a text", field=name)
        if _LONE_SURROGATE.search(example[name]):
            raise DataError("has a lone surrogate, which no file can store", "valid Unicode", field=name)
    return {name: example[name] for name in RAW_FIELDS}


def to_row(example: Mapping[str, str], split: str, index: int) -> dict[str, Any]:
    """One row of SCHEMA; `ability` is "math" in the published files too."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [
            {"role": "system", "content": example["instruction"]},
            {"role": "user", "content": example["input"]},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": example["output"]},
        "extra_info": {"split": split, "index": index} | {name: example[name] for name in RAW_FIELDS},
    }


@dataclass(frozen=True, slots=True)
class ListedTool:
    """A tool as ToolRL lists it: parameters are a flat map of name -> {description, type, default}."""

    name: str
    description: str
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def tool_list(tools: Iterable[ListedTool]) -> str:
    """The numbered list under ToolRL's heading, three lines per tool."""
    lines = [TOOLS_HEADING, "In your response, you can use the following tools:"]
    for number, tool in enumerate(tools, 1):
        lines += [
            f"{number}. Name: {tool.name}",
            f"Description: {tool.description}",
            f"Parameters: {json.dumps(tool.parameters)}",
        ]
    return "\n".join(lines)


def observation(results: Iterable[Mapping[str, Any]]) -> str:
    """ListedTool feedback in the dialogue so far: <obs> [{"name": .., "results": ..}, ..] </obs>."""
    return f"<obs> {json.dumps(list(results))} </obs>"


def dialogue(turns: Iterable[str]) -> str:
    """The user message: ToolRL's heading and the turns, oldest first, already tagged."""
    return "**Dialogue Records History**\n" + "\n\n".join(turns)


def strip_thought(output: str) -> str:
    """A gold response with its reasoning replaced by ToolRL's placeholder, as in RL rows.

    Real thoughts may mention the tags; the answer is the text after the first `</think>`.
    """
    answer = output.partition(THINK_END)[2].lstrip("\n") if THINK_END in output else output
    thought = CALL_THOUGHT if TOOL_CALL in answer else RESPONSE_THOUGHT
    return f"{THINK} {thought} {THINK_END}\n{answer}"
