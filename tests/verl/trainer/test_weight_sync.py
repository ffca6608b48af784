"""A weight sync between ranks and engines: its calls, and its end when either fails."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.weight_sync import filled
from toolrl.check.preflight.scripted_engine import ScriptedEngine
from verl.errors import EngineError, EngineLostError
from verl.rollout.engine import Sampling
from verl.rollout.pool import EnginePool
from verl.single_controller.group import task_name
from verl.trainer.policy import PackSettings, Policy
from verl.trainer.weight_sync import WeightSync
from verl.transfer.bucket import BucketHandle, BucketLayout, Receiver, plan
from verl.transfer.shared_memory import SharedMemory
from verl.types import Completion
from verl.workers.policy_worker import PolicyWorker

WEIGHTS = {f"w{number}": torch.full((40,), float(number)) for number in range(9)}


class Frozen:
    """The model of a rank: nothing to offload."""

    def offload_optimizer(self) -> None:
        """Nothing."""

    offload_all = offload_optimizer


class Rank(PolicyWorker):
    """Its weights are `WEIGHTS`. gather: what happens when a bucket is gathered"""

    def __init__(self, bucket_bytes: int, sends: bool, gather: Callable[[int], object]) -> None:
        super().__init__(Frozen(), 1.0)  # type: ignore[arg-type]
        self.layouts = plan(WEIGHTS.items(), torch.float32, bucket_bytes)
        self.sender = SharedMemory() if sends else None
        self.gather = gather

    def send_bucket(self, number: int, version: int) -> BucketHandle | None:
        self.gather(number)
        layout = replace(self.layouts[number], version=version)
        return None if self.sender is None else self.sender.send(layout, filled(layout, self.sender, WEIGHTS))


class Engine(ScriptedEngine):
    """Receives weights. fails: by the number of a bucket, what it raises then"""

    def __init__(self, fails: dict[int, Exception] | None = None) -> None:
        super().__init__(lambda prompt_ids, index: (1,))
        self.fails, self.found = fails or {}, dict[str, Tensor]()
        self._receiver = Receiver(torch.device("cpu"))

    async def begin_weights(self, layouts: Sequence[BucketLayout]) -> None:
        self._receiver.begin(layouts)

    async def load_bucket(self, layout: BucketLayout, *handles: BucketHandle) -> None:
        if layout.number in self.fails:
            raise self.fails[layout.number]
        flat = self._receiver.receive(layout, handles)
        self.found |= {name: view.clone() for name, view in layout.named(flat)}

    async def end_weights(self, version: int) -> None:
        self._receiver.end()

    @property
    def is_whole(self) -> bool:
        return self.found.keys() == WEIGHTS.keys() and all(
            torch.equal(self.found[name], WEIGHTS[name]) for name in WEIGHTS
        )


@dataclass
class Group:
    """Workers in this process, a thread for each call of a rank. calls: of each function"""

    workers: list[Any]
    calls: Counter[str] = field(default_factory=Counter)

    @property
    def size(self) -> int:
        return len(self.workers)

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self._collected(function, [args] * self.size)

    def scatter(self, function: Callable[..., Any], shards: Iterable[Any], *args: Any) -> list[Any]:
        return self._collected(function, [(shard, *args) for shard in shards])

    def _collected(self, function: Callable[..., Any], args: Sequence[Sequence[Any]]) -> list[Any]:
        self.calls[task_name(function).rpartition(".")[2]] += 1
        results: dict[int, Any] = {}

        def work(rank: int) -> None:
            try:
                results[rank] = function(self.workers[rank], *args[rank])
            except Exception as error:  # noqa: BLE001  raised in the caller
                results[rank] = error

        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(self.size)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        for each in results.values():
            if isinstance(each, Exception):
                raise each
        return [results[rank] for rank in range(self.size)]

    async def submit(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        self.calls[task_name(function)] += 1
        return await function(self.workers[rank], *args)

    async def remake(self, rank: int) -> None:
        self.workers[rank] = Engine()


def made(
    engines: Sequence[Engine], num_ranks: int = 2, bucket_bytes: int = 160, gather: Callable[[int], object] = id
) -> tuple[WeightSync, Group, Group]:
    """Rank 0 sends to all engines."""
    ranks = Group([Rank(bucket_bytes, not rank, gather) for rank in range(num_ranks)])
    group = Group(list(engines))
    pool = EnginePool(group, [[0]] * len(engines), remake=group.remake)  # type: ignore[arg-type]
    policy = Policy(ranks, PackSettings())  # type: ignore[arg-type]
    layouts = ranks.workers[0].layouts
    sync = WeightSync(policy=policy, engine=pool, layouts=layouts, probes=[], sampling=Sampling(1), tolerance=0.0)
    return sync, ranks, group


@pytest.mark.parametrize("bucket_bytes", [1, 10**6])
async def test_the_number_of_calls_does_not_depend_on_the_number_of_buckets(bucket_bytes: int) -> None:
    sync, ranks, engines = made([Engine(), Engine()], 3, bucket_bytes)
    for version in (1, 2):
        await sync.push(version)
    assert all(each.is_whole for each in engines.workers)
    assert ranks.calls == {"begin_weight_sync": 2, "send_weights": 2}
    assert engines.calls == dict.fromkeys(("connect", "begin_weights", "load_weights", "end_weights"), 2 * 2)


async def test_an_engines_failure_ends_the_sync_without_waiting_for_ranks() -> None:
    """These are not left behind in a collective, either: they gather what is left."""
    held, gathered = threading.Event(), list[int]()

    def gather(number: int) -> None:
        gathered.append(number)
        if number == 2:
            assert held.wait(30)

    sync, ranks, _ = made([Engine({1: EngineError("checksum mismatch")}), Engine()], 2, gather=gather)
    with pytest.raises(EngineError, match="checksum mismatch"):
        await asyncio.wait_for(sync.push(1), 60)
    assert max(gathered) <= 2
    before = threading.active_count()
    held.set()
    while threading.active_count() == before or len(gathered) < 2 * len(WEIGHTS):
        await asyncio.sleep(0.01)
    assert sorted(gathered) == sorted([*range(len(WEIGHTS))] * 2)
    await asyncio.wait_for(asyncio.to_thread(ranks.workers[0].begin_weight_sync), 5)


async def test_a_ranks_failure_ends_the_sync_with_its_own_error() -> None:
    def gather(number: int) -> None:
        if number == 4:
            raise RuntimeError("out of memory")

    sync, _, _ = made([Engine(), Engine()], gather=gather)
    with pytest.raises(RuntimeError, match="out of memory"):
        await asyncio.wait_for(sync.push(1), 60)


async def test_a_lost_engine_gets_the_weights_once_it_is_replaced() -> None:
    sync, ranks, engines = made([Engine({3: EngineLostError("vLLM died")}), Engine()])
    await asyncio.wait_for(sync.push(1), 60)
    pool: Any = sync.engine
    assert pool.lost == [0] and engines.workers[1].is_whole
    await sync._to_lost(1)
    assert pool.lost == [] and engines.workers[0].is_whole
    assert ranks.calls["send_weights"] == 2 and engines.calls["load_weights"] == 3


async def test_no_rank_waits_for_an_engine_that_is_lost_before_its_first_bucket() -> None:
    """Though its process lives, and so does not hang up: a vLLM that dies when the weight sync starts."""

    class Lost(Engine):
        async def begin_weights(self, layouts: Sequence[BucketLayout]) -> None:
            raise EngineLostError("vLLM died")

    sync, _, engines = made([Lost(), Engine()])
    await asyncio.wait_for(sync.push(1), 60)
    assert engines.workers[1].is_whole
    await asyncio.wait_for(sync._to_lost(1), 60)
    assert engines.workers[0].is_whole


async def test_no_rank_waits_for_an_engine_that_is_lost_while_it_writes() -> None:
    class Writes(Engine):
        async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
            await asyncio.sleep(0.3)
            raise EngineLostError("vLLM died")

    sync, _, engines = made([Writes(), Engine()])
    request = asyncio.create_task(sync.engine.generate((1,), Sampling(1)))
    await asyncio.sleep(0.1)
    await asyncio.wait_for(sync.push(1), 60)
    assert engines.workers[1].is_whole
    request.cancel()


async def test_a_canceled_sync_leaves_no_thread_behind() -> None:
    before, reached = threading.active_count(), threading.Event()

    class Slow(Engine):
        async def load_bucket(self, layout: BucketLayout, *handles: BucketHandle) -> None:
            reached.set()
            await asyncio.sleep(30)

    sync, _, _ = made([Slow(), Engine()])
    pushing = asyncio.create_task(sync.push(1))
    while not reached.is_set():
        await asyncio.sleep(0.01)
    pushing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pushing
    for _ in range(6000):
        if threading.active_count() <= before:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(threading.enumerate())


async def test_engines_that_refuse_the_names_leave_the_ranks_alone() -> None:
    class Refuses(Engine):
        async def begin_weights(self, layouts: Sequence[BucketLayout]) -> None:
            raise EngineError("other names")

    sync, ranks, engines = made([Refuses(), Engine()])
    with pytest.raises(EngineError, match="other names"):
        await sync.push(1)
    assert ranks.calls == {"begin_weight_sync": 1}
    engines.workers[0] = Engine()
    await asyncio.wait_for(sync.push(2), 60)  # what was started does not stand in the way
    assert all(each.is_whole for each in engines.workers)
