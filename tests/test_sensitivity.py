"""The mistakes that tests must notice: each fits the present source; and the script that runs the tests with each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench.sensitivity import suite
from bench.sensitivity.mistakes import MISTAKES
from bench.sensitivity.mutants import MUTANTS
from bench.sensitivity.planting import Edit, Mistake, NotApplicableError, plant
from tests.conftest import ROOT

TIES = next(each for each in MUTANTS if each.name == "ties_to_the_last")
QUICK = "tests/verl/utils/reward_score/test_base.py"
HARMLESS = Mistake("harmless", "Nothing is wrong.", (Edit("verl/units.py", "GIB", "GIB  # a comment\n"),), (QUICK,))


@pytest.mark.parametrize("mistake", [*MISTAKES, *MUTANTS], ids=lambda each: each.name)
def test_a_mistake_fits_the_source(mistake: Mistake) -> None:
    for file, text in mistake.edited().items():
        compile(text, file, "exec")
        assert text != (ROOT / file).read_text("utf-8")
    assert mistake.tests and all((ROOT / path).exists() for path in mistake.tests)
    assert mistake.wrong.endswith(".")


def test_names_are_distinct() -> None:
    names = [each.name for each in (*MISTAKES, *MUTANTS)]
    assert len(set(names)) == len(names) == 48


@pytest.mark.parametrize(("old", "count"), [("no such text", 0), ("def ", 3)])
def test_a_text_that_does_not_occur_exactly_once_is_an_error(old: str, count: int, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def one(): ...\ndef two(): ...\ndef three(): ...\n")
    mistake = Mistake("one", "All is wrong.", (Edit("a.py", old, ""),), ())
    with pytest.raises(NotApplicableError, match=rf"a\.py has this text {count} times, not once:\n{old}"):
        mistake.edited(tmp_path)


def test_later_edits_of_a_file_find_what_earlier_ones_wrote(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one")
    edits = (Edit("a.py", "one", "two, three"), Edit("a.py", "two", "four"))
    assert Mistake("one", "All is wrong.", edits, ()).edited(tmp_path) == {"a.py": "four, three"}


def test_a_command_in_a_copy_runs_the_mistake(tmp_path: Path) -> None:
    """Of two equal predictions the second is taken. What is not copied is there, too."""
    plant(TIES, tmp_path / "copy")
    code = (
        "from verl.utils.reward_score.matching import greedy_pairs\n"
        "call = {'name': 'a', 'parameters': {}}\n"
        "print(greedy_pairs([call], [call, call], lambda *_: 1.0)[0].predicted)\n"
    )
    found = []
    for folder in (ROOT, tmp_path / "copy"):
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        command = [sys.executable, "-c", code]
        found.append(subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True).stdout)
    assert found == ["0\n", "1\n"]
    assert (tmp_path / "copy/pyproject.toml").read_text() == (ROOT / "pyproject.toml").read_text()
    assert not (tmp_path / "copy/verl").is_symlink()


def answers(monkeypatch: pytest.MonkeyPatch, of: dict[str | None, list[str]]) -> None:
    """In place of the tests: what fails, by mistake."""

    def failing(mistake: Mistake | None, tests: Sequence[str]) -> list[str]:
        return of.get(mistake and mistake.name, ["some test"])

    monkeypatch.setattr(suite, "failing", failing)


def test_the_exit_code_is_one_for_an_unnoticed_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers(monkeypatch, {None: [], "late_mask": []})
    assert suite.main(["late_mask", "no_warm_up"]) == 1
    assert "1 of 2 are noticed; not: late_mask" in capsys.readouterr().out
    assert suite.main(["no_warm_up"]) == 0
    assert "1 of 1 are noticed; not: none" in capsys.readouterr().out


def test_tests_that_fail_without_a_mistake_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, {None: ["a broken test"]})
    assert suite.main(["late_mask"]) == 2


def test_mistakes_are_chosen_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert suite.main(["--list", "--mutants"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(MUTANTS)
    with pytest.raises(SystemExit, match="unknown: nonsense; --list prints all names"):
        suite.main(["nonsense"])


@pytest.mark.long
def test_tests_run_in_the_copy() -> None:
    assert suite.failing(HARMLESS, HARMLESS.tests) == []
    worded = (Edit("verl/utils/reward_score/functions.py", "a finite number, or a dict", "a number, or a dict"),)
    (failed, *_) = suite.failing(replace(HARMLESS, edits=worded), HARMLESS.tests)
    assert failed.startswith(f"{QUICK}::test_anything_else_is_an_error_that_names_the_function")
    with pytest.raises(suite.NoResultError, match="no_such_file"):
        suite.failing(None, ("tests/no_such_file.py",))
