"""A small repository with a bug, its hidden tests and its fix; an environment with pytest, made without network."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
from collections.abc import Coroutine
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from scripts.data.validation import diff
from scripts.swe.prepare import make_environment
from tests.support.programs import need
from toolrl.swe.runtime import RuntimeLimits
from toolrl.swe.tasks import Repository, SweTask

need("git")  # also a program of every repository's own, for its patch
T = TypeVar("T")
BUG = "def add(a, b):\n    return a - b\n\n\ndef name():\n    return 'calc'\n"
FIX = BUG.replace("a - b", "a + b")
FILES = {
    "calc/__init__.py": "from calc.core import add, name\n",
    "calc/core.py": BUG,
    "tests/test_name.py": "from calc import name\n\n\ndef test_name():\n    assert name() == 'calc'\n",
    "README.md": "A calculator.\n",
}
TEST = """import unittest
from calc import add


def test_add():
    assert add(1, 2) == 3


class TestAdd(unittest.TestCase):
    def test_zero(self):
        self.assertEqual(add(0, 5), 5)


def test_nothing():
    assert add(4, 0) == 4
"""
NAMED = """import pytest
from calc import add


@pytest.mark.parametrize("a, b, expected", [(1, 2, 3), (0, 5, 5), (4, 0, 4)])
def test_rows(a, b, expected):
    assert add(a, b) == expected


def test_local():
    expected = 3
    assert add(1, 2) == expected, f"not {expected}"
"""
HIDDEN = {"tests/test_calc.py": TEST}
GOLD = diff(FILES, {**FILES, "calc/core.py": FIX})


def git(folder: Path, *arguments: str) -> str:
    """What it prints."""
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


def with_history(folder: Path) -> Path:
    """The repository with the bug, whose branch `main` and stash have the fix."""
    if (folder / ".git").exists():
        return folder
    git(write(folder, FILES), "init", "-q", "-b", "main")
    for text, message in ((BUG, "base"), (FIX, "fix")):
        write(folder, {"calc/core.py": text})
        git(folder, "add", "-A")
        git(folder, "commit", "-q", "-m", message)
    git(folder, "checkout", "-q", "HEAD~1")
    write(folder, {"calc/core.py": FIX + "\n"})
    git(folder, "stash", "-q")
    return folder


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def patch(changes: dict[str, str]) -> str:
    """A diff that makes these changes to the repository."""
    return diff(FILES, {**FILES, **changes})


@cache
def _made() -> tempfile.TemporaryDirectory[str]:
    """Once in a process: it is compiled for seconds."""
    made = tempfile.TemporaryDirectory()
    make_environment(Path(made.name) / "environment", copy=["pytest"])
    return made


def pytest_environment(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    return str(shutil.copytree(Path(_made().name) / "environment", folder / "environment", symlinks=True))


def calc_task(folder: Path, environment: str = "", **fields: Any) -> SweTask:
    """The task of the repository, which is written to a folder, with the fix in its history."""
    given: dict[str, Any] = {
        "id": "calc",
        "statement": "add subtracts",
        "fail_to_pass": ("tests/test_calc.py::test_add", "tests/test_calc.py::TestAdd::test_zero"),
        "pass_to_pass": ("tests/test_calc.py::test_nothing", "tests/test_name.py::test_name"),
        "repository": Repository(str(with_history(folder / "calc"))),
        "environment": environment,
        "hidden_tests": HIDDEN,
        "gold_patch": GOLD,
        "test_timeout_s": 250.0,  # of a busy machine
        "limits": RuntimeLimits(memory_mib=512, file_mib=64),
    }
    return SweTask(**(given | fields))


def run(main: Coroutine[Any, Any, T], timeout_s: float = 290.0) -> T:
    return asyncio.run(asyncio.wait_for(main, timeout_s))
