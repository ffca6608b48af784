"""What a weight sync costs before a byte moves: seconds of its calls, by ranks and buckets, with real Ray actors.

    python bench/sync_calls.py [--ranks 8,16,32] [--handles 1] [--buckets 8,32,128] [--engines 2] [--rounds 3]

Two sides in turn, in one run, with the same actors:

a call a bucket   as it was: each bucket is a call of every rank, and one of every engine with the bucket's handle
a call a sync     the product's `WeightSync.push`: each rank is called once, and buckets go to engines over connections

Both include the calls before and after the buckets. Ranks and engines are tiny: nothing is gathered, a bucket is 512
bytes, which the engine's receiver checks. All processes share the cores of this machine. handles: ranks beyond the
first are called that many times each, as if they were as many ranks. The last lines are a least-squares fit of the
medians by ranks, buckets and their product, and what it gives for 512 ranks and 244 buckets (32B in bfloat16, 256 MiB
each): an extrapolation.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from weight_sync import Sink

from verl.host.daemon import run_in_daemon_thread
from verl.rollout.engine import Sampling
from verl.rollout.pool import EnginePool
from verl.single_controller.group import Method, WorkerContext
from verl.single_controller.ray import Bundle, Cluster, RayGroup
from verl.trainer.policy import PackSettings, Policy
from verl.trainer.weight_sync import WeightSync
from verl.transfer.bucket import BucketHandle, BucketLayout, plan
from verl.transfer.shared_memory import SharedMemory
from verl.workers.policy_worker import PolicyWorker

LARGE = (512, 244)  # ranks, buckets
SIDES = ("a call a bucket", "a call a sync")


class NoModel:
    """Nothing to offload."""

    def offload_optimizer(self) -> None:
        """Nothing."""

    offload_all = offload_optimizer


class Rank(PolicyWorker):
    """A rank whose buckets are ready. The first sends them."""

    def __init__(self, seat: WorkerContext) -> None:
        super().__init__(NoModel(), 1.0, host=seat.own_host)  # type: ignore[arg-type]
        self.sender = None if seat.rank else SharedMemory()

    def send_bucket(self, number: int, version: int) -> BucketHandle | None:
        if self.sender is None:
            return None
        layout = replace(self.layouts[number], version=version)
        return self.sender.send(layout, self.sender.buffer(layout).fill_(number))


def use(rank: Rank, layouts: Sequence[BucketLayout]) -> None:
    """Send these from now on."""
    rank.layouts = layouts


def references(ranks: RayGroup, number: int, version: int) -> list[Any]:
    """Of all ranks' handles of a bucket, once all are there."""
    called = [each.run.remote(Rank.send_bucket, number, version) for each in ranks._actors]
    ranks._wait([marker for marker, _ in called], "send_bucket")
    return [handle for _, handle in called]


async def call_a_bucket(ranks: RayGroup, engines: RayGroup, layouts: Sequence[BucketLayout], version: int) -> None:
    """One bucket is gathered while the engines load the one before."""
    layouts = [replace(each, version=version) for each in layouts]

    async def on_engines(method: str, *args: Any) -> None:
        await asyncio.gather(*(engines.submit(rank, Method(method), *args) for rank in range(engines.size)))

    await run_in_daemon_thread(ranks.call, PolicyWorker.begin_weight_sync)
    await on_engines("begin_weights", layouts)
    loading = asyncio.create_task(asyncio.sleep(0))
    for each in layouts:
        handle = (await run_in_daemon_thread(references, ranks, each.number, version))[0]
        await loading
        loading = asyncio.create_task(on_engines("load_bucket", each, handle))
    await loading
    await on_engines("end_weights", version)
    await run_in_daemon_thread(ranks.call, PolicyWorker.end_weight_sync)


async def call_a_sync(ranks: RayGroup, engines: RayGroup, layouts: Sequence[BucketLayout], version: int) -> None:
    """The product."""
    policy, pool = Policy(ranks, PackSettings()), EnginePool(engines, [[0]] * engines.size)
    sync = WeightSync(policy=policy, engine=pool, layouts=layouts, probes=[], sampling=Sampling(1), tolerance=0.0)
    await sync.push(version)
    await run_in_daemon_thread(policy.end_weight_sync)


async def seconds(work: Callable[[int], Awaitable[None]], version: int) -> float:
    started = time.perf_counter()
    await work(version)
    return time.perf_counter() - started


async def measure(ranks: RayGroup, engines: RayGroup, buckets: int, rounds: int) -> list[float]:
    """Median seconds of both sides, which alternate after a round that is not counted."""
    layouts = plan([(f"w{number}", torch.zeros(128)) for number in range(buckets)], torch.float32, 1)
    ranks.call(use, layouts)
    found: list[list[float]] = [[], []]
    versions = itertools.count()
    for _ in range(rounds + 1):
        for side, push in enumerate((call_a_bucket, call_a_sync)):
            found[side].append(await seconds(lambda version: push(ranks, engines, layouts, version), next(versions)))  # noqa: B023
    return [statistics.median(each[1:]) for each in found]


def fitted(sizes: Sequence[tuple[int, int]], medians: Sequence[float]) -> tuple[list[float], float]:
    """Seconds of a sync, per rank, per bucket and per both; and those of the large size."""

    def terms(ranks: int, buckets: int) -> list[float]:
        return [1.0, ranks, buckets, ranks * buckets]

    weights = 1 / np.asarray(medians)  # relative errors
    rows = np.asarray([terms(*size) for size in sizes]) * weights[:, None]
    found = np.linalg.lstsq(rows, np.ones(len(medians)), rcond=None)[0]
    return found.tolist(), float(found @ terms(*LARGE))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="8,16,32", help="actors")
    parser.add_argument("--handles", type=int, default=1)
    parser.add_argument("--buckets", default="8,32,128")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    numbers = [int(each) for each in arguments.ranks.split(",")]
    counts = [int(each) for each in arguments.buckets.split(",")]
    os.environ["OMP_NUM_THREADS"] = "1"
    sizes: list[tuple[int, int]] = []
    medians: list[list[float]] = []
    print(f"| ranks | buckets | {SIDES[0]}, s | {SIDES[1]}, s |\n|---|---|---|---|", flush=True)
    with Cluster.start(max(numbers) + arguments.engines) as cluster:
        seat = Bundle(num_cpus=1.0)
        all_ranks = cluster.group("trainer", Rank, cluster.pool([seat] * max(numbers)), seat)
        engines = cluster.group("rollout", Sink, cluster.pool([seat] * arguments.engines), seat)
        actors = all_ranks._actors
        with closing(all_ranks), closing(engines):
            for number in numbers:
                all_ranks._actors = [actors[0], *actors[1:number] * arguments.handles]
                for buckets in counts:
                    sizes.append((all_ranks.size, buckets))
                    medians.append(asyncio.run(measure(all_ranks, engines, buckets, arguments.rounds)))
                    before, after = medians[-1]
                    print(f"| {all_ranks.size} | {buckets} | {before:.3f} | {after:.3f} |", flush=True)
            all_ranks._actors = actors
    for name, side in zip(SIDES, zip(*medians, strict=True), strict=True):
        (base, rank, bucket, both), large = fitted(sizes, side)
        terms = f"{1e3 * base:.1f} ms + {1e3 * rank:.2f} ms a rank + {1e3 * bucket:.2f} ms a bucket"
        print(f"{name}: {terms} + {1e3 * both:.4f} ms a rank and bucket; extrapolated to {LARGE}: {large:.2f} s")


if __name__ == "__main__":
    main()
