"""What knows the judge and tries to pass without a fix: all of it scores 0."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.toolrl.swe.repositories import GOLD, NAMED
from tests.toolrl.swe.verdicts import Place, place
from toolrl.swe.cheats import CHEATS, try_cheats
from toolrl.swe.scoring import PatchOutcome, PatchVerdict

__all__ = ["place"]
pytestmark = pytest.mark.long  # each starts runtimes
NO_REPORT, TAMPERED = PatchOutcome.NO_REPORT, PatchOutcome.TAMPERED
# What finds it; for others, the tests run as if it was not there.
FOUND = {
    "__held__ does nothing": TAMPERED,
    "values are guessed before the tests": TAMPERED,
    "guesses in a test of another name": TAMPERED,
    "all is sent and the process ends": TAMPERED,
    "messages on every descriptor": TAMPERED,
    "a method of the judge is called": TAMPERED,
    "a report on standard output": NO_REPORT,
    "an object equals everything": TAMPERED,
    "a number equals everything": TAMPERED,
    "a text equals everything": TAMPERED,
    "tests without their lines": TAMPERED,
    "runtest does nothing": TAMPERED,
    "every call passes": TAMPERED,
    "one row stands for all": TAMPERED,
    "code of pytest is exchanged": TAMPERED,
    "files of the tests are rewritten": TAMPERED,
    "tests are imported without their lines": TAMPERED,
    "the runner exits 0": NO_REPORT,
    "a fork goes on": NO_REPORT,
    "another program in its place": NO_REPORT,
    "the judge is killed": NO_REPORT,
}
GUESSES = (
    *("an object equals the first of several", "the most usual of several candidates"),
    "the candidate that is written in another style",
)
BY_CHANCE = (
    *("a thread forges while tests run", "a signal forges while tests run", "a process stays for the next run"),
    *("a fork goes on", "the most usual of several candidates"),  # in a tenth of runs all candidates are alike
)


@pytest.fixture(scope="module")
def cheated(place: Place) -> dict[str, PatchVerdict]:
    """Of all cheats: two at a time, as some wait."""

    async def tried(names: Sequence[str]) -> dict[str, PatchVerdict]:
        return {name: verdict async for name, verdict in try_cheats(place.runtimes, place.task, names)}

    async def main() -> dict[str, PatchVerdict]:
        names = [*CHEATS]
        first, second = await asyncio.gather(tried(names[::2]), tried(names[1::2]))
        return first | second

    return place.runner.run(main())


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_scores_zero(cheated: dict[str, PatchVerdict], name: str) -> None:
    verdict = cheated[name]
    assert (verdict.score.total, verdict.held) == (0.0, 0.0), verdict
    assert verdict.fail_to_pass == 0.0 or name in GUESSES  # 1 of 8 for each assertion
    assert verdict.outcome is FOUND.get(name, PatchOutcome.UNRESOLVED) or name in BY_CHANCE


OF_NAMES = (
    *("local names of the test", "parameters of the test", "rows of the test", "the id of the test"),
    *("one row stands for all", "an object equals everything", "a number equals everything", "constants of the test"),
    *("the source of the test", "the candidate that is written in another style"),
)


def test_what_parameters_and_local_names_hold_is_expected_by_the_judge_alone(place: Place) -> None:
    rows = [f"tests/test_calc.py::test_rows[{each}]" for each in ("1-2-3", "0-5-5", "4-0-4")]
    task = replace(
        place.task,
        hidden_tests={"tests/test_calc.py": NAMED},
        fail_to_pass=("tests/test_calc.py::test_local", *rows[:2]),
        pass_to_pass=("tests/test_name.py::test_name", rows[2]),
    )
    fixed = place.score(GOLD, task)
    assert (fixed.outcome, fixed.held, fixed.opened) == (PatchOutcome.RESOLVED, 1.0, frozenset()), fixed.detail
    assert fixed.passed == {*task.fail_to_pass, *task.pass_to_pass}

    async def main() -> dict[str, tuple[float, bool]]:
        tried = try_cheats(place.runtimes, task, OF_NAMES)
        return {name: (each.score.total, each.fail_to_pass > 0 and name not in GUESSES) async for name, each in tried}

    assert place.runner.run(main()) == dict.fromkeys(OF_NAMES, (0.0, False))
