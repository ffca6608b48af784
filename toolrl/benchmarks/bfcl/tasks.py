"""BFCL's rows, and its multi-turn scenarios as tasks, from the optional package `bfcl-eval`."""

import ast
import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from verl.errors import ConfigError, DataError
from verl.types import Message, Task

Category = Literal["base", "miss_func", "miss_param", "long_context"]
CATEGORIES: tuple[Category, ...] = ("base", "miss_func", "miss_param", "long_context")
TRAIN_SCENARIOS = 150  # of 200; the four variants of a scenario are in the same split
_INSTALL = "pip install --no-deps bfcl-eval==2026.3.23 mpmath"
_JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array"}


class UserMessage(BaseModel):
    role: str
    content: str


class BfclExtra(BaseModel):
    """Task.extra."""

    classes: list[str]
    initial_config: dict[str, Any]
    long_context: bool
    turns: list[list[UserMessage]]
    excluded: list[str]
    withheld: dict[str, list[str]]  # turn -> functions unavailable before it


class GoldCall(BaseModel):
    name: str
    positional: list[Any]
    named: dict[str, Any]


FAULTY: Mapping[str, str] = {
    "multi_turn_miss_func_49": "the gold calls `tail` while it is withheld",
    **{f"multi_turn_{name}_173": "the gold closes a ticket by a text, where ids are numbers" for name in CATEGORIES},
}


def bfcl_tasks(
    category: Category = "base",
    split: Literal["train", "test", "all"] = "train",
    limit: int | None = None,
    keep_faulty: bool = False,
) -> list[Task]:
    """Scenarios 0 to 149 (train) or 150 to 199 (test) of one category, without those whose gold cannot be executed.

    Task.prompt is the first user turn. Task.answer is JSON: per turn a list of calls as (positional arguments, named
    arguments). Raises ConfigError if the package is missing or the category unknown.
    """
    if category not in CATEGORIES or split not in ("train", "test", "all"):
        raise ConfigError(f"no BFCL category {category!r} with split {split!r}; categories: {', '.join(CATEGORIES)}")
    rows = bfcl_rows(f"multi_turn_{category}", ("involved_classes", "initial_config"))
    scenarios = {"train": range(TRAIN_SCENARIOS), "test": range(TRAIN_SCENARIOS, 200), "all": range(200)}[split]
    tasks = [
        _task(row, gold, category)
        for row, gold in rows
        if int(row["id"].rpartition("_")[2]) in scenarios and (keep_faulty or row["id"] not in FAULTY)
    ]
    return tasks[:limit]


def data_folder() -> Path:
    """The package's data folder. Raises ConfigError if it is not installed."""
    spec = find_spec("bfcl_eval")
    if spec is None or spec.origin is None:
        raise ConfigError(f"BFCL needs the package bfcl-eval: {_INSTALL}")
    return Path(spec.origin).parent / "data"


def bfcl_rows(category: str, fields: Sequence[str], with_gold: bool = True) -> list[tuple[dict[str, Any], list[Any]]]:
    """(row, its ground truth, if the category has any). Raises DataError, with file and row, for invalid files."""
    path = data_folder() / f"BFCL_v4_{category}.json"
    rows = _json_lines(path, ("id", "question", *fields))
    if not with_gold:
        return [(row, []) for row in rows]
    gold_path = path.parent / "possible_answer" / path.name
    golds = _json_lines(gold_path, ("id", "ground_truth"))
    if [gold["id"] for gold in golds] != [row["id"] for row in rows]:
        raise DataError("has different ids", f"the ids of {path}", f"Reinstall it: {_INSTALL}", file=str(gold_path))
    return [(row, gold["ground_truth"]) for row, gold in zip(rows, golds, strict=True)]


def json_schema(schema: Mapping[str, Any], closed: bool = False) -> dict[str, Any]:
    """BFCL's type names mapped to JSON Schema (`any`: no type). `closed`: objects allow no additional properties."""
    converted = {key: value for key, value in schema.items() if (key, value) != ("type", "any")}
    if "type" in converted:
        converted["type"] = _JSON_TYPES.get(converted["type"], converted["type"])
    if "items" in converted:
        converted["items"] = json_schema(converted["items"], closed)
    if "properties" in converted:
        converted["properties"] = {name: json_schema(value, closed) for name, value in converted["properties"].items()}
        if closed:
            converted["additionalProperties"] = False
    return converted


def _json_lines(path: Path, fields: Sequence[str]) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot be read ({error})", hint=f"Reinstall it: {_INSTALL}", file=str(path)) from error
    return [_row(line, fields, path, number) for number, line in enumerate(lines)]


def _row(line: str, fields: Sequence[str], path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or not row.keys() >= set(fields):
        expected = f"an object with {', '.join(fields)}"
        raise DataError("is not a BFCL row", expected, f"Reinstall it: {_INSTALL}", file=str(path), row=number)
    return row


def _task(row: Mapping[str, Any], gold: list[list[str]], category: Category) -> Task:
    first, *later = row["question"]
    extra = {
        "classes": row["involved_classes"],
        "initial_config": row["initial_config"],
        "long_context": category == "long_context",
        "turns": later,
        "excluded": row.get("excluded_function", []),
        "withheld": row.get("missed_function", {}),
    }
    prompt = tuple(Message(message["role"], message["content"]) for message in first)
    answer = json.dumps([[_call(text) for text in turn] for turn in gold])
    return Task(row["id"], prompt, answer, data_source=f"bfcl_multi_turn_{category}", env="bfcl", extra=extra)


def _call(text: str) -> dict[str, Any]:
    """`f(1, a='x')` as {"name": "f", "positional": [1], "named": {"a": "x"}}, parsed as literals, never executed."""
    node = ast.parse(text.strip(), mode="eval").body
    assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
    return {"name": node.func.id, "positional": [ast.literal_eval(value) for value in node.args], "named": named}
