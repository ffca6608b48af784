"""The script that injects bugs: what becomes a task, that it is one, and that the script goes on after a stop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.data.inject_bugs import main
from tests.toolrl.sandbox.sandbox_host import need_bubblewrap
from tests.toolrl.swe.repositories import pytest_environment, write

FILES = {
    "calc/__init__.py": "",
    "calc/core.py": '''def add(a, b):
    """The sum of two numbers."""
    return a + b


def unused(a):
    return a + 1
''',
    "tests/test_add.py": """from pathlib import Path

import pytest
from calc.core import add


def test_add():
    assert add(2, 3) == 5


def test_zero():
    assert add(0, 0) == 0


@pytest.mark.parametrize("text", ["a b - c", "d"])
def test_text(text):
    assert add(text, "") == text


def test_that_fails_anyhow():
    assert add(1, 1) == 3


def test_that_passes_once():
    seen = Path("/tmp/seen")
    assert not seen.exists()
    seen.touch()
""",
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> str:
    need_bubblewrap()
    return pytest_environment(tmp_path_factory.mktemp("environment"))


def run(folder: Path, environment: str, *argv: str) -> tuple[int, list[dict[str, Any]]]:
    output = folder / "bugs.jsonl"
    options = ["--environment", environment, "--output", str(output), "--concurrent", "1", *argv]
    code = main(["--repo", str(folder / "calc-1"), *options])
    return code, [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []


@pytest.mark.long
def test_a_bug_that_some_tests_notice_is_a_task(
    tmp_path: Path, environment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "calc-1", FILES)
    code, rows = run(tmp_path, environment, "--validate")
    assert code == 0
    kinds = {row["kind"]: row for row in rows}
    # Swapped variables notice nothing but the order of a text; what no test covers is no task.
    row = kinds["swapped_operator"]
    assert row["FAIL_TO_PASS"] == [
        "tests/test_add.py::test_add", "tests/test_add.py::test_text[a b - c]", "tests/test_add.py::test_text[d]"
    ]  # fmt: skip
    assert row["PASS_TO_PASS"] == ["tests/test_add.py::test_zero"]
    assert json.loads(row["hidden_tests"]) == {"tests/test_add.py": FILES["tests/test_add.py"]}
    assert "+    return a - b" in row["bug_patch"] and "+    return a + b" in row["patch"]
    assert "`add` in `calc/core.py`" in row["problem_statement"]
    assert "    The sum of two numbers." in row["problem_statement"]
    assert "assert -1 == 5" in row["problem_statement"] and "3 tests that passed" in row["problem_statement"]
    for secret in ("assert add", "a + b", *FILES["tests/test_add.py"].split("\n\n")):
        assert secret not in row["problem_statement"]
    output = capsys.readouterr().err
    assert (
        "no test notices" in output and "calc-1: flaky and dropped: tests/test_add.py::test_that_passes_once" in output
    )
    assert (tmp_path / "bugs.jsonl.report").read_text() in output

    tried = (tmp_path / "bugs.jsonl.tried").read_text()
    half = tried.splitlines()[0] + '\n{"key": "writ'
    (tmp_path / "bugs.jsonl.tried").write_text(half)
    assert run(tmp_path, environment, "--validate") == (0, rows)
    (tmp_path / "bugs.jsonl").unlink()
    assert run(tmp_path, environment, "--validate", "--tasks", "1") == (0, rows[:1])
    (tmp_path / "bugs.jsonl.tried").unlink()
    assert run(tmp_path, environment, "--concurrent", "2") == (0, rows)  # validation changes no valid row
    assert run(tmp_path, environment, "--max-failing", "2")[1] == []


@pytest.mark.long
def test_a_repository_without_a_test_that_passes_is_refused(
    tmp_path: Path, environment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "calc-1", {"calc.py": "", "test_calc.py": "import missing\n\ndef test_a():\n    pass\n"})
    assert run(tmp_path, environment) == (2, [])
    output = capsys.readouterr().err
    assert "calc-1: no test passes" in output and "No module named 'missing'" in output


def test_a_missing_package_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = ["--package", "no-such-package-of-anybody==1", "--output", str(tmp_path / "a.jsonl")]
    assert main(missing) == 2
    assert "--package no-such-package-of-anybody==1" in capsys.readouterr().err


def test_an_environment_with_the_code_before_the_bug_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "calc-1", FILES)
    write(tmp_path / "environment/lib/python3.11/site-packages", {"calc/core.py": ""})
    assert run(tmp_path, str(tmp_path / "environment")) == (2, [])
    assert "has calc without the bug: remove it" in capsys.readouterr().err
