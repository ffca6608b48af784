"""Later turns of an episode go to the engine whose cache holds the turns before."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from tests.support.virtual_clock import VirtualClockLoop
from tests.verl.rollout.test_engine_loss import Engine, Engines
from verl.rollout.engine import Sampling
from verl.rollout.pool import EnginePool, OnWeightSync


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    """Waits of these tests take no time."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        yield runner


def pool_of(engines: Engines, on_weight_sync: OnWeightSync | None = None) -> EnginePool:
    return EnginePool(engines, [[0]] * engines.size, on_weight_sync, remake=engines.remake)  # type: ignore[arg-type]


def turn_of(episode: int | None, num_tokens: int = 10) -> Sampling:
    return Sampling(num_tokens, seed=5, episode=episode)


async def turns(pool: EnginePool, engines: Engines, number: int, episodes: Sequence[int]) -> dict[int, int]:
    """The engine that each of these episodes asked for its turn of this number, all at once."""
    await asyncio.gather(*(pool.generate((number, episode), turn_of(episode)) for episode in episodes))
    found = [(prompt, rank) for rank, engine in enumerate(engines.engines) for prompt, _ in engine.asked]
    asked = {episode: rank for (turn, episode), rank in found if turn == number and episode in episodes}
    assert sorted(asked) == sorted(episodes)
    return asked


def test_every_turn_goes_to_the_engine_of_the_first(runner: asyncio.Runner) -> None:
    async def played() -> None:
        engines = Engines([Engine() for _ in range(3)])
        pool = pool_of(engines)
        first = await turns(pool, engines, 1, range(12))
        assert set(Counter(first.values()).values()) == {4}
        for number, order in ((2, [*range(12)][::-1]), (3, [5, 1, 11, 0, 2, 3, 4, 6, 7, 8, 9, 10]), (4, [7, 10])):
            assert await turns(pool, engines, number, order) == {episode: first[episode] for episode in order}

    runner.run(played())


def test_an_engine_with_much_more_to_do_gives_episodes_away_for_good(runner: asyncio.Runner) -> None:
    """Of the idle engines the first is taken, so one engine has all 30 episodes that begin one after the other. When
    their next turns come at once, an engine has at most 1.5 times as many as another, and 4."""

    async def played() -> None:
        engines = Engines([Engine() for _ in range(3)])
        pool = pool_of(engines)
        for episode in range(30):
            assert await turns(pool, engines, 1, [episode]) == {episode: 0}
        second = await turns(pool, engines, 2, range(30))
        loads = Counter(second.values())
        assert loads[0] == max(loads.values()) > 10  # as many as it may have
        assert loads[0] <= 1.5 * min(loads.values()) + 4 + 1
        for episode in range(30):
            assert await turns(pool, engines, 3, [episode]) == {episode: second[episode]}

    runner.run(played())


def test_requests_without_an_episode_go_to_the_least_loaded_engine(runner: asyncio.Runner) -> None:
    async def played() -> None:
        engines = Engines([Engine(), Engine()])
        pool = pool_of(engines)
        for _ in range(2):  # the second four, in the other order
            await asyncio.gather(*(pool.generate((number,), turn_of(None)) for number in range(4)))
        asked = [[prompt for (prompt,), _ in each.asked] for each in engines.engines]
        assert asked == [[0, 2, 0, 2], [1, 3, 1, 3]]

    runner.run(played())


@pytest.mark.parametrize("on_weight_sync", [None, OnWeightSync.CONTINUE])
def test_a_weight_sync_empties_the_caches(on_weight_sync: OnWeightSync | None, runner: asyncio.Runner) -> None:
    async def played() -> None:
        engines = Engines([Engine(), Engine()])
        pool = pool_of(engines, on_weight_sync)
        assert await turns(pool, engines, 1, [0, 1]) == {0: 0, 1: 1}
        assert await turns(pool, engines, 2, [1, 0]) == {0: 0, 1: 1}
        await pool.begin_weights([])
        await pool.end_weights(1)
        assert await turns(pool, engines, 3, [1, 0]) == {1: 0, 0: 1}

    runner.run(played())


def test_an_engine_that_is_lost_leaves_its_episodes_to_others(runner: asyncio.Runner) -> None:
    async def played() -> None:
        engines = Engines([Engine(), Engine()])
        pool = pool_of(engines)
        assert await turns(pool, engines, 1, [0, 1]) == {0: 0, 1: 1}
        engines.engines[0].dead.set()
        assert await turns(pool, engines, 2, [0, 1]) == {0: 1, 1: 1}
        assert pool.num_retried == 1

    runner.run(played())
