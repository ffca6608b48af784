"""tau2-bench's tasks: policy.md, tasks.json, split_tasks.json and db.json(.gz) of retail/ and airline/."""

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from toolrl.benchmarks.tau2.users import scripted_opening
from verl.errors import ConfigError, DataError
from verl.json_values import read_json
from verl.types import Message, Task

Domain = Literal["retail", "airline"]
DOMAINS: tuple[Domain, ...] = ("retail", "airline")


class Instructions(BaseModel):
    """The user's knowledge and goals."""

    reason_for_call: str | None
    known_info: str | None
    task_instructions: str | None


class Tau2Extra(BaseModel):
    """Task.extra."""

    domain: Domain
    instructions: Instructions


class Action(BaseModel):
    name: str
    arguments: dict[str, Any]


class GoldOutcome(BaseModel):
    """Task.answer as JSON: the gold actions and the information to communicate."""

    actions: list[Action]
    communicate: list[str]


def tau2_tasks(data: str, domain: Domain = "retail", split: Literal["train", "test", "all"] = "train") -> list[Task]:
    """The tasks of a domain. Task.prompt: its policy, and the first message of the scripted user.

    Raises ConfigError if the folder lacks a file, DataError with row and field for invalid data.
    """
    if domain not in DOMAINS or split not in ("train", "test", "all"):
        raise ConfigError(f"tau2 has no domain {domain!r} with split {split!r}; domains: {', '.join(DOMAINS)}")
    folder = Path(data) / domain
    policy = read_file(folder / "policy.md")
    try:
        rows = read_json(read_file(folder / "tasks.json"))
        chosen = {row["id"] for row in rows}
        if split != "all":
            ids = set(read_json(read_file(folder / "split_tasks.json"))[split])
            if ids - chosen:
                raise ValueError(f"there is no task {min(ids - chosen, key=str)!r}, which split {split!r} names")
            chosen = ids
    except (ValueError, KeyError, TypeError) as error:
        expected = "a list of objects with ids, and lists of these ids by split"
        problem = f"tasks.json or split_tasks.json cannot be read ({error!r})"
        raise DataError(problem, expected, file=str(folder)) from error
    path = str(folder / "tasks.json")
    return [_check(row, domain, policy, path, number) for number, row in enumerate(rows) if row["id"] in chosen]


def _check(row: Mapping[str, Any], domain: str, policy: str, file: str, number: int) -> Task:
    try:
        return _task(row, domain, policy)
    except (KeyError, TypeError) as error:
        field = str(error.args[0]) if isinstance(error, KeyError) else ""
        problem = "is missing" if field else f"is not a task ({error})"
        raise DataError(problem, "a task of tau2-bench", file=file, row=number, field=field) from error


def read_database(data: str, domain: str) -> dict[str, dict[str, Any]]:
    """Tables of records by id, from db.json or db.json.gz."""
    path = Path(data) / domain / "db.json"
    packed = path.with_suffix(".json.gz")
    text = gzip.decompress(packed.read_bytes()).decode() if packed.is_file() else read_file(path)
    tables: dict[str, dict[str, Any]] = read_json(text)
    return tables


def read_file(path: Path) -> str:
    """A file of the data folder. Raises ConfigError if it is missing."""
    if not path.is_file():
        hint = "option `data` must be a folder like tau2-bench's data/tau2/domains"
        raise ConfigError(f"environment 'tau2': there is no file {path}; {hint}")
    return path.read_text(encoding="utf-8")


def _task(row: Mapping[str, Any], domain: str, policy: str) -> Task:
    instructions = row["user_scenario"]["instructions"]
    criteria = row["evaluation_criteria"]
    gold = {
        "actions": [{"name": action["name"], "arguments": action["arguments"]} for action in criteria["actions"]],
        "communicate": criteria["communicate_info"],
    }
    return Task(
        id=f"tau2_{domain}#{row['id']}",
        prompt=(Message("system", policy), Message("user", scripted_opening(instructions))),
        answer=json.dumps(gold),
        data_source=f"tau2_{domain}_scripted_user",
        env="tau2",
        extra={"domain": domain, "instructions": instructions},
    )
