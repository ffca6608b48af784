"""Equal patches of one task are scored once, whatever happens to the episode that scores first."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.toolrl.swe.repositories import calc_task
from toolrl.swe import scoring
from toolrl.swe.runtime import RuntimeLostError
from toolrl.swe.scoring import PatchOutcome, PatchVerdict, SharedVerdicts
from toolrl.swe.tasks import SweTask


@pytest.fixture
def task(tmp_path: Path) -> SweTask:
    return calc_task(tmp_path, "")


class Scorer:
    """Gives its outcomes in turn, each as soon as it may."""

    def __init__(self, *outcomes: PatchOutcome | Exception) -> None:
        self.outcomes, self.calls, self.may_end = list(outcomes), 0, asyncio.Event()

    async def __call__(self) -> PatchVerdict:
        self.calls += 1
        outcome = self.outcomes[self.calls - 1]
        await self.may_end.wait()
        if isinstance(outcome, Exception):
            raise outcome
        return PatchVerdict(outcome)


async def test_equal_patches_of_one_task_share_a_verdict(task: SweTask) -> None:
    shared, score = SharedVerdicts(), Scorer(*(3 * [PatchOutcome.RESOLVED]))
    other = replace(task, fail_to_pass=("tests/test_calc.py::other",))  # with the same id
    pairs = [(task, "a"), (task, "b"), (other, "a"), (task, "a"), (task, "b")]
    waiting = [asyncio.create_task(shared.get(each, patch, score)) for each, patch in pairs]
    await asyncio.sleep(0)
    assert score.calls == 3
    score.may_end.set()
    assert {verdict.outcome for verdict in await asyncio.gather(*waiting)} == {PatchOutcome.RESOLVED}
    await shared.get(task, "a", score)
    assert score.calls == 3


@pytest.mark.parametrize("first", [RuntimeLostError("gone"), asyncio.CancelledError()])
async def test_a_patch_whose_scoring_was_lost_is_scored_again(task: SweTask, first: BaseException) -> None:
    shared = SharedVerdicts()
    lost = isinstance(first, RuntimeLostError)
    score = Scorer(first if lost else PatchOutcome.RESOLVED, PatchOutcome.RESOLVED)
    one, other = (asyncio.create_task(shared.get(task, "a", score)) for _ in range(2))
    await asyncio.sleep(0)
    if not lost:
        one.cancel()
    score.may_end.set()
    with pytest.raises(type(first)):
        await one
    assert (await other).outcome is PatchOutcome.RESOLVED
    assert score.calls == 2


@pytest.mark.parametrize("outcome", [PatchOutcome.TIMEOUT, PatchOutcome.NO_REPORT])
async def test_outcomes_that_load_can_cause_are_not_shared(task: SweTask, outcome: PatchOutcome) -> None:
    shared, score = SharedVerdicts(), Scorer(outcome, PatchOutcome.RESOLVED)
    score.may_end.set()
    assert [(await shared.get(task, "a", score)).outcome for _ in range(3)] == [
        outcome,
        *(2 * [PatchOutcome.RESOLVED]),
    ]


async def test_the_oldest_verdicts_are_forgotten(task: SweTask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "MOST_KEPT", 2)
    shared, score = SharedVerdicts(), Scorer(*(5 * [PatchOutcome.UNRESOLVED]))
    score.may_end.set()
    for patch in ("a", "b", "c", "b", "c", "a"):
        await shared.get(task, patch, score)
    assert score.calls == 4
