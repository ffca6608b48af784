"""Engines that are lost while they write, or while they are given weights: others take their places."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from tests.support.tiny import MINI
from tests.support.virtual_clock import VirtualClockLoop
from verl.batch.token_batch import Floats, TokenBatch
from verl.build.env import single_turn_runner
from verl.chat.template import ChatTemplate
from verl.episodes.group import GroupRollout
from verl.errors import EngineError, EngineLostError, LostRequestError
from verl.rollout.engine import Sampling
from verl.rollout.pool import EnginePool, OnWeightSync
from verl.scoring.pool import DirectScorer
from verl.single_controller.group import WorkerLostError
from verl.trainer.weight_sync import StaleEngineError, WeightSync
from verl.transfer.bucket import plan
from verl.transfer.stream import Address
from verl.types import Completion, FinishReason, Message, Score, Task, Trajectory

TEN = Sampling(max_tokens=10, seed=5)


class Engine:
    """Writes its version, a token at a turn of the event loop; dies as a call in `dies` begins, or on request."""

    def __init__(self, dies: Sequence[str] = ()) -> None:
        self.dies = dies
        self.version = 0  # that of the model's folder
        self.dead = asyncio.Event()
        self.asked: list[tuple[tuple[int, ...], int | None]] = []

    async def _live(self, call: str) -> None:
        if call in self.dies:
            self.dead.set()
        await asyncio.sleep(0.001)
        if self.dead.is_set():
            raise WorkerLostError("rollout rank x died")

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
        self.asked.append((tuple(prompt_ids), sampling.seed))
        for _ in range(sampling.max_tokens):
            await self._live("generate")
        token_ids = (self.version,) * sampling.max_tokens
        return (Completion(token_ids, (0.0,) * len(token_ids), FinishReason.LENGTH, self.version),) * sampling.n

    async def interrupt(self) -> None:
        await self._live("interrupt")

    async def metrics(self) -> dict[str, float]:
        return {}

    async def connect(self, addresses: Mapping[int, Address]) -> dict[int, list[bytes]]:
        await self._live("connect")
        return {rank: [b"key"] for rank in addresses}

    async def begin_weights(self, layouts: object) -> None:
        await self._live("begin")

    async def load_weights(self) -> None:
        await self._live("load")

    async def end_weights(self, version: int) -> None:
        await self._live("end")
        self.version = version

    async def sleep(self) -> None:
        await self._live("sleep")


class Engines:
    """A worker group of engines that can be replaced."""

    def __init__(self, engines: Sequence[Engine], replacements: Sequence[Engine] = ()) -> None:
        self.engines, self.replacements = list(engines), list(replacements)
        self.remade: list[int] = []

    @property
    def size(self) -> int:
        return len(self.engines)

    async def submit(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        return await function(self.engines[rank], *args)

    async def remake(self, rank: int) -> None:
        self.remade.append(rank)
        await asyncio.sleep(0.005)
        self.engines[rank] = self.replacements.pop(0) if self.replacements else Engine()


class Policy:
    """Trainer ranks whose weights are those of `version`; they must not be asked by two at once."""

    def __init__(self) -> None:
        self.published = 0

    def begin_weight_sync(self) -> dict[int, Address]:
        self.published += 1
        return {0: ("127.0.0.1", 1)}

    def send_weights(self, keys: Mapping[int, Sequence[bytes]], version: int) -> None:
        assert set(keys) <= {0}

    def end_weight_sync(self) -> None:
        """Nothing."""

    def shard_for_scoring(self, batch: TokenBatch) -> TokenBatch:
        return batch

    def score(self, batch: TokenBatch) -> Floats:
        return np.zeros(int(batch.num_trained.sum()), dtype=np.float32)


def pool_with_sync(engines: Engines, on_weight_sync: OnWeightSync | None = None) -> tuple[EnginePool, WeightSync]:
    pool = EnginePool(engines, [[0]] * engines.size, on_weight_sync, remake=engines.remake)  # type: ignore[arg-type]
    weight_sync = WeightSync(
        policy=Policy(),
        engine=pool,
        layouts=plan([], torch.float32, 1),
        probes=[(1,)],
        sampling=Sampling(2),
        tolerance=0.5,
    )  # type: ignore[arg-type, list-item]
    pool.restore = weight_sync.restore
    return pool, weight_sync


@pytest.fixture(autouse=True)
def runner() -> Iterator[asyncio.Runner]:
    """Waits of these tests take no time."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        yield runner


async def published(weight_sync: WeightSync, version: int) -> float:
    async with weight_sync.ranks:
        return await asyncio.wait_for(weight_sync.sync(version), 20)


async def answered(pool: EnginePool, count: int) -> list[Completion]:
    asked = (pool.generate((number,), replace(TEN, seed=number)) for number in range(count))
    return [each for (each,) in await asyncio.wait_for(asyncio.gather(*asked), 20)]


@pytest.mark.parametrize("on_weight_sync", [None, *OnWeightSync])
@pytest.mark.parametrize("size", [1, 2])
async def test_requests_of_a_lost_engine_are_repeated_with_seed_and_weight_version(
    size: int, on_weight_sync: OnWeightSync | None
) -> None:
    engines = Engines([Engine() for _ in range(size)])
    pool, weight_sync = pool_with_sync(engines, on_weight_sync)
    await published(weight_sync, 7)
    first = engines.engines[0]
    asyncio.get_running_loop().call_later(0.004, first.dead.set)
    done = await answered(pool, 6)
    assert [each.versions for each in done] == [(7,) * 10] * 6
    while pool.lost:
        await asyncio.sleep(0.001)
    async with weight_sync.ranks:
        assert engines.remade == [0] and pool.num_remade == 1 and engines.engines[0].version == 7
    lost = [asked for asked in first.asked if asked[0] != (1,) or asked[1] is not None]
    assert pool.num_retried == len(lost) > 0
    counts = {"rollout/engine_restarts": 1.0, "rollout/requests_retried": len(lost)}
    assert await pool.metrics() == counts and set((await pool.metrics()).values()) == {0.0}
    again = [asked for engine in engines.engines for asked in engine.asked]
    assert all(asked in again for asked in lost)
    assert all(each.versions == (7,) * 10 for each in await answered(pool, 6))


@pytest.mark.parametrize("call", ["connect", "begin", "load", "end", "generate"])
@pytest.mark.parametrize("size", [1, 2])
async def test_an_engine_lost_during_weight_sync_gets_the_weights_when_it_is_replaced(size: int, call: str) -> None:
    engines = Engines([Engine([call]), *(Engine() for _ in range(size - 1))], [Engine([call])])
    pool, weight_sync = pool_with_sync(engines)
    assert await published(weight_sync, 1) == 0.0
    assert engines.remade == [0, 0] and [engine.version for engine in engines.engines] == [1] * size
    assert [each.versions for each in await answered(pool, 4)] == [(1,) * 10] * 4


async def test_a_replaced_engine_waits_for_rank_users_and_their_weight_sync() -> None:
    engines = Engines([Engine()])
    pool, weight_sync = pool_with_sync(engines, OnWeightSync.CONTINUE)
    await published(weight_sync, 1)
    response = asyncio.ensure_future(pool.generate((3,), TEN))
    async with weight_sync.ranks:  # the policy learns
        engines.engines[0].dead.set()
        await asyncio.sleep(0.05)
        assert pool.lost == [0] and engines.remade == [] and not response.done()
        await weight_sync.sync(2)
    (done,) = await asyncio.wait_for(response, 20)
    assert done.versions == (2,) * 10
    await asyncio.sleep(0.02)
    assert engines.remade == [0] and weight_sync.policy.published == 2  # type: ignore[attr-defined]


async def test_an_engine_that_keeps_being_lost_ends_the_run_with_its_cause() -> None:
    pool, weight_sync = pool_with_sync(Engines([Engine(["load"])], [Engine(["load"]) for _ in range(9)]))
    with pytest.raises(EngineError, match=r"lost 4 times within one step; last cause: rollout rank x"):
        await published(weight_sync, 1)
    assert pool.num_remade == 3


async def test_a_failed_engine_replacement_is_raised_to_all_waiting_calls() -> None:
    class NoRoom(Engines):
        async def remake(self, rank: int) -> None:
            raise RuntimeError("no room")

    engines = NoRoom([Engine()])
    pool, weight_sync = pool_with_sync(engines)
    await published(weight_sync, 1)
    engines.engines[0].dead.set()
    asked = [pool.generate((number,), TEN) for number in range(3)]
    assert all(
        isinstance(each, RuntimeError) and str(each) == "no room"
        for each in await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 20)
    )


async def test_a_replaced_engine_with_other_weights_is_found_out() -> None:
    class Deaf(Engine):
        async def end_weights(self, version: int) -> None:
            """Keeps its own."""

    with pytest.raises(StaleEngineError, match=r"answers with version \[0\]"):
        engines = Engines([Engine()], [Deaf()])
        pool, weight_sync = pool_with_sync(engines)
        await published(weight_sync, 1)
        engines.engines[0].dead.set()
        await pool.generate((1,), TEN)


class One:
    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        return Score(1.0, {})


async def test_a_request_that_loses_two_engines_is_a_fault_and_not_a_zero() -> None:
    chat = ChatTemplate(AutoTokenizer.from_pretrained(MINI / "tokenizer"))
    task = Task("13", (Message("user", "x"),), "", "")

    class Poisoned(Engine):
        async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
            if tuple(prompt_ids) == chat.task_prompt_ids(task):
                self.dead.set()
            return await super().generate(prompt_ids, sampling)

    pool, weight_sync = pool_with_sync(Engines([Poisoned()], [Poisoned() for _ in range(9)]))
    await published(weight_sync, 1)
    rollout = GroupRollout(pool, DirectScorer(One()), Sampling(3), single_turn_runner(chat, 3))
    group = await asyncio.wait_for(rollout.run(task, 2, 0), 20)
    assert group.rewards == () and len(group.faults) == 2
    assert group.faults[0].startswith("13, response 0: the engine was lost 2 times in a row; last cause: rollout")
    whole = await asyncio.wait_for(rollout.run(Task("14", (Message("user", "y"),), "", ""), 2, 0), 20)
    assert whole.rewards == (1.0, 1.0) and whole.faults == ()


async def test_without_a_way_to_replace_it_a_lost_engine_is_an_error() -> None:
    with pytest.raises(WorkerLostError, match="rank x died"):
        engine = Engine()
        engine.dead.set()
        await EnginePool(Engines([engine]), [[0]]).generate((1,), TEN)  # type: ignore[arg-type]
    assert issubclass(EngineLostError, EngineError) and issubclass(LostRequestError, EngineError)
