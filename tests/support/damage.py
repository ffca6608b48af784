"""Damage to the files of a run, a form each, and values of wrong types for every field."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np

from verl.tracking.jsonl import read_jsonl

JUNK = bytes(range(256)) * 40 + b"\n" + b"\xff\xfe\n"
VALUES: tuple[Any, ...] = (
    *(None, True, -3, 10**400, 0.5, math.nan, math.inf, "x", "", [], [None], ["x"], [[]], [{}]),
    *({}, {"a": None}, {"total": None}, {"total": math.nan, "parts": {}}, {"total": 1, "parts": {"a": "x"}}),
    *([{"role": "user"}], [{"role": None, "content": "x"}], [{"role": "assistant", "content": "x", "tool_calls": {}}]),
    *([{"role": "assistant", "content": "", "tool_calls": [{}]}], [{"name": {}, "status": [], "seconds": "x"}]),
)


def each_field_wrong(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The row with every field missing, or of every other type."""
    missing = [{name: value for name, value in row.items() if name != field} for field in row]
    return missing + [{**row, field: value} for field in row for value in VALUES]


def add_wrong_rows(path: Path) -> None:
    """Add the first row of a file in every wrong form."""
    wrong = each_field_wrong(read_jsonl(path)[-1])
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in wrong)


def replaced(name: str, content: bytes) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return damage


def added(name: str, line: str) -> Callable[[Path], None]:
    """A line in front of a file's."""

    def damage(folder: Path) -> None:
        path = folder / name
        path.write_text(f"{line}\n{path.read_text() if path.exists() else ''}")

    return damage


def directory(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return damage


def linked(name: str, target: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / name
        rmtree(path) if path.is_dir() else path.unlink()
        path.symlink_to(target)

    return damage


def pipe(name: str) -> Callable[[Path], None]:
    """A named pipe that no program writes to."""

    def damage(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return damage


def bomb(name: str) -> Callable[[Path], None]:
    """A small archive of an array with a gigabyte of zeros."""

    def damage(folder: Path) -> None:
        np.savez_compressed(folder / name, header=np.zeros(1 << 30, dtype=np.uint8))

    return damage


def copied(name: str, copy: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / copy).write_bytes((folder / name).read_bytes())

    return damage


def cut(name: str) -> Callable[[Path], None]:
    """The middle of a file is lost."""

    def damage(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 3] + content[len(content) // 2 :])

    return damage
