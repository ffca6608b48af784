"""Workers as Ray actors: the verbs, what travels, and what a caller hears when a worker fails or dies."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import verl.single_controller.ray
from verl.errors import ConfigError
from verl.single_controller.group import Member, Seat, WorkerError, WorkerGroup, WorkerLostError
from verl.single_controller.local import LocalGroup
from verl.single_controller.ray import Bundle, Cluster, PlacementGroup, RayGroup

BUNDLE, SEATED = Bundle(1.0), Bundle(0.5)  # a place has room for two


class Worker:
    """What the tests' groups hold."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.inner = {"rank": seat.rank}
        self.word = asyncio.Event()


def rank_of(worker: Worker, *more: int) -> int:
    return worker.seat.rank + sum(more)


def add(worker: Worker, shard: int, more: int) -> int:
    return worker.seat.rank + shard + more


def tensors(worker: Worker) -> list[tuple[str, torch.Tensor]]:
    return [("a", torch.full((4,), float(worker.seat.rank))), ("b", torch.arange(3).to(torch.bfloat16))]


def total(worker: Worker, named: list[tuple[str, torch.Tensor]]) -> float:
    return sum(float(tensor.float().sum()) for _, tensor in named)


def inner_rank(inner: dict[str, int], more: int) -> int:
    return inner["rank"] + more


def variable(worker: Worker, name: str) -> str:
    return os.environ[name]


class Result:
    """Takes note of where it is unpacked."""

    def __reduce__(self) -> tuple[Any, ...]:
        return unpacked, (bytes(1 << 20),)  # more than travels inside an answer


unpackings: list[int] = []


def unpacked(content: bytes) -> Result:
    unpackings.append(os.getpid())
    return Result()


def result(worker: Worker) -> Result:
    return Result()


def nothing_of(worker: Worker, result: Result) -> int:
    return len(unpackings)


def fail(worker: Worker) -> None:
    if worker.seat.rank == 1:
        raise ValueError("seven")


def complain(worker: Worker) -> None:
    raise ConfigError("model.path is wrong")


def nap(worker: Worker, seconds: float) -> None:
    time.sleep(seconds)


async def listen(worker: Worker) -> bool:
    return await worker.word.wait()


async def say(worker: Worker) -> None:
    worker.word.set()


async def meet(worker: Worker, seconds: float) -> float:
    await asyncio.sleep(seconds)
    return time.monotonic()


def die(worker: Worker) -> None:
    if worker.seat.rank == 1:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(2)
    raise RuntimeError("connection closed by peer")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster.start(4, {"WITHLENGTH": "1"}, call_timeout_s=300) as started:
        yield started


@pytest.fixture(scope="module")
def pool(cluster: Cluster) -> PlacementGroup:
    return cluster.pool([BUNDLE] * 2)


@pytest.fixture(scope="module")
def group(cluster: Cluster, pool: PlacementGroup) -> Iterator[RayGroup]:
    made = cluster.group("tester", Worker, pool, SEATED)
    yield made
    made.close()


def check_verbs(group: WorkerGroup) -> None:
    ranks = list(range(group.size))
    assert group.call(rank_of, 1, 2) == [rank + 3 for rank in ranks]
    assert group.scatter(add, [10 * rank for rank in ranks], 5) == [11 * rank + 5 for rank in ranks]
    refs = group.refer(tensors)
    assert group.call(total, refs[-1]) == [4.0 * ranks[-1] + 3.0] * group.size
    assert asyncio.run(awaited(group)) == 7 + ranks[-1]
    assert Member(group, "inner").call(inner_rank, 1) == [rank + 1 for rank in ranks]


async def awaited(group: WorkerGroup) -> Any:
    return await group.submit(group.size - 1, rank_of, 7)


def test_verbs_on_actors(group: RayGroup) -> None:
    check_verbs(group)
    assert len(set(group.pids) | {os.getpid()}) == 3
    assert group.call(variable, "WITHLENGTH") == ["1", "1"]


def test_verbs_in_this_process() -> None:
    check_verbs(LocalGroup(Worker(Seat(0, 1))))


def test_coroutines_of_one_worker_run_side_by_side(group: RayGroup) -> None:
    async def both() -> float:
        started = time.monotonic()
        await asyncio.gather(group.submit(0, meet, 1.0), group.submit(0, meet, 1.0))
        return time.monotonic() - started

    assert asyncio.run(both()) < 1.9


def test_a_word_to_a_worker_need_not_wait_behind_all_that_it_owes(group: RayGroup) -> None:
    async def heard() -> list[bool]:
        waiting = [asyncio.ensure_future(group.submit(0, listen)) for _ in range(1500)]
        await asyncio.wait_for(group.submit(0, say), 60)
        return await asyncio.gather(*waiting)

    assert all(asyncio.run(heard()))


def test_an_exception_names_the_rank_and_what_it_was_doing(group: RayGroup) -> None:
    with pytest.raises(WorkerError, match=r"tester rank 1 of 2 \(process \d+ on node \w+\) failed in fail: .*seven"):
        group.call(fail)
    with pytest.raises(ConfigError, match=r"model\.path is wrong"):
        group.call(complain)
    with pytest.raises(WorkerError, match=r"rank 1 .* failed in fail"):
        asyncio.run(group.submit(1, fail))  # type: ignore[arg-type]


def test_results_are_unpacked_once_and_those_that_are_referred_to_not_at_all(group: RayGroup) -> None:
    unpackings.clear()
    refs = group.refer(result)
    assert unpackings == [] and group.call(nothing_of, refs[0]) == [1, 1]
    group.call(result)
    assert unpackings == [os.getpid()] * group.size


def test_a_call_has_a_deadline_and_a_killed_worker_is_the_cause_not_what_its_neighbours_say(
    cluster: Cluster, pool: PlacementGroup
) -> None:
    group = cluster.group("tester", Worker, pool, SEATED)
    group._timeout_s = 1.0
    with pytest.raises(WorkerError, match=r"ranks \[0, 1\] did not end nap within 1 s"):
        group.call(nap, 2.0)
    group._timeout_s = 60.0
    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"tester rank 1 of 2 .* died during die"):
        group.call(die)
    assert time.monotonic() - started < 30
    group.close()


def counted(worker: Worker) -> int:
    worker.inner["rank"] += 1
    return worker.inner["rank"]


def test_a_worker_that_stays_stopped_is_lost_and_one_that_goes_on_in_time_is_not(pool: PlacementGroup) -> None:
    group = Cluster(60.0, health_timeout_s=4.0).group("tester", Worker, pool, SEATED)
    pid = group.pids[1]
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(1.5, os.kill, (pid, signal.SIGCONT)).start()
    assert group.call(rank_of) == [0, 1]
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(
        WorkerLostError,
        match=rf"tester rank 1 of 2 \(process {pid} .*\) does not answer since 4 s; its process is stopped",
    ):
        group.call(rank_of)
    assert 3.0 < time.monotonic() - started < 30
    group.close()


def test_a_stopped_worker_is_found_from_another_machine(pool: PlacementGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl.single_controller.ray, "machine", lambda: "elsewhere")
    group = Cluster(60.0, health_timeout_s=3.0).group("tester", Worker, pool, SEATED)
    os.kill(group.pids[0], signal.SIGSTOP)
    with pytest.raises(WorkerLostError, match=r"tester rank 0 of 2 .* its process is stopped"):
        group.call(rank_of)
    group.close()


def test_another_worker_takes_the_place_of_a_dead_one(pool: PlacementGroup) -> None:
    async def replaced(group: RayGroup) -> None:
        before = group.pids
        os.kill(before[1], signal.SIGKILL)
        with pytest.raises(WorkerLostError, match=rf"rank 1 of 2 \(process {before[1]} .* died during counted"):
            await group.submit(1, counted)
        await group.remake(1)
        assert group.pids[0] == before[0] and group.pids[1] != before[1]
        assert await group.submit(1, counted) == 2 and await group.submit(1, seat_of) == seats[1]

    group = Cluster(60.0).group("tester", Worker, pool, SEATED)
    seats = group.call(seat_of)
    assert group.call(counted) == [1, 2]
    asyncio.run(replaced(group))
    assert group.call(counted) == [2, 3]
    group.close()


def seat_of(worker: Worker) -> Seat:
    return worker.seat


def test_a_factory_that_fails_is_heard(cluster: Cluster, pool: PlacementGroup) -> None:
    with pytest.raises(WorkerError, match=r"failed in start: .*KeyError"):
        cluster.group("tester", broken_factory, pool, SEATED)


@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "ray://127.0.0.1:{port}", "[::1]:{port}", "127.0.0.1:99999"])
def test_an_address_where_nobody_listens_is_told_at_once(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # taken, but not listened at
        address = address.format(port=free.getsockname()[1])
        monkeypatch.setenv("RAY_ADDRESS", address)
        started = time.monotonic()
        with pytest.raises(ConfigError, match=rf"RAY_ADDRESS={re.escape(address)}: nobody answers.*ray start --head"):
            Cluster.start(1).__enter__()
    assert time.monotonic() - started < 5


def broken_factory(seat: Seat) -> None:
    raise KeyError("no such thing")
