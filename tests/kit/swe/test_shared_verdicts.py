"""Equal patches of one task are scored once, whatever happens to the episode that scores first."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kit.swe.repositories import calc_task
from verl.kit.swe import scoring
from verl.kit.swe.runtime import RuntimeLostError
from verl.kit.swe.scoring import PatchOutcome, PatchVerdict, SharedVerdicts
from verl.kit.swe.tasks import SweTask


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


def test_equal_patches_of_one_task_share_a_verdict(task: SweTask) -> None:
    async def main() -> None:
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

    asyncio.run(main())


@pytest.mark.parametrize("first", [RuntimeLostError("gone"), asyncio.CancelledError()])
def test_a_patch_whose_scoring_was_lost_is_scored_again(task: SweTask, first: BaseException) -> None:
    async def main() -> None:
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

    asyncio.run(main())


@pytest.mark.parametrize("outcome", [PatchOutcome.TIMEOUT, PatchOutcome.NO_REPORT])
def test_what_load_can_cause_is_not_kept(task: SweTask, outcome: PatchOutcome) -> None:
    async def main() -> None:
        shared, score = SharedVerdicts(), Scorer(outcome, PatchOutcome.RESOLVED)
        score.may_end.set()
        assert [(await shared.get(task, "a", score)).outcome for _ in range(3)] == [
            outcome,
            *(2 * [PatchOutcome.RESOLVED]),
        ]

    asyncio.run(main())


def test_the_oldest_verdicts_are_forgotten(task: SweTask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "MOST_KEPT", 2)

    async def main() -> None:
        shared, score = SharedVerdicts(), Scorer(*(5 * [PatchOutcome.UNRESOLVED]))
        score.may_end.set()
        for patch in ("a", "b", "c", "b", "c", "a"):
            await shared.get(task, patch, score)
        assert score.calls == 4

    asyncio.run(main())
