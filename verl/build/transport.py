"""Chooses how weights get from the trainer ranks to the engines, and connects both."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from verl.build.engines import engine_dtype
from verl.build.ranks import DTYPES
from verl.config.schema import Config
from verl.host.daemon import run_async, run_in_daemon_thread
from verl.single_controller.group import Method, ReplaceableGroup
from verl.single_controller.ray import RayGroup
from verl.trainer.policy import Policy
from verl.transfer.bucket import BUCKET_BYTES, BucketLayout, OpenSender
from verl.transfer.gpu import CudaIpc, NcclBroadcast, Rendezvous
from verl.transfer.shared_memory import ByValue, SharedMemory


@dataclass(frozen=True)
class WeightTransport:
    """How weights get from the trainer ranks to the engines."""

    senders: Sequence[OpenSender]  # per trainer rank
    sources: Sequence[Sequence[int]]  # per engine: the ranks that send to it
    rendezvous: Rendezvous | None = None  # where rank 0 waits for the engines (NCCL only)


def cpu_transport(rank_nodes: Sequence[str], engine_nodes: Sequence[str]) -> WeightTransport:
    """Shared memory, written by the first rank of each node, if every engine has a rank on its node; else whole buckets
    from rank 0. Both arguments are node names."""
    if not set(engine_nodes) <= set(rank_nodes):
        return WeightTransport([ByValue, *[None] * (len(rank_nodes) - 1)], [[0]] * len(engine_nodes))
    sources = [rank_nodes.index(node) for node in engine_nodes]
    senders: list[OpenSender] = [SharedMemory if rank in sources else None for rank in range(len(rank_nodes))]
    return WeightTransport(senders, [[rank] for rank in sources])


def gpu_transport(config: Config, trainer: RayGroup) -> WeightTransport:
    """CUDA IPC if colocated, since every rank holds the whole gathered bucket; else NCCL broadcast from rank 0."""
    ranks, parallel = config.num_ranks, config.rollout.tensor_model_parallel_size
    if config.rollout.colocated:
        sources = [range(first * parallel, (first + 1) * parallel) for first in range(config.num_engines)]
        senders = [CudaIpc if rank < config.num_engines * parallel else None for rank in range(ranks)]
        return WeightTransport(senders, sources)
    host, port = trainer.addresses()[0]
    rendezvous = Rendezvous(host, port, 1 + config.num_engines * parallel)
    sender = partial(NcclBroadcast, rendezvous)
    return WeightTransport([sender, *[None] * (ranks - 1)], [[0]] * config.num_engines, rendezvous)


def connect(
    config: Config, policy: Policy, engines: ReplaceableGroup, transport: WeightTransport
) -> list[BucketLayout]:
    """Connect ranks and engines for weight sync; returns the bucket layouts. NCCL engines join concurrently."""
    dtype, size = DTYPES[engine_dtype(config)], BUCKET_BYTES
    rendezvous, parallel = transport.rendezvous, config.rollout.tensor_model_parallel_size

    async def connect_both() -> list[BucketLayout]:
        ranks = asyncio.create_task(run_in_daemon_thread(policy.connect, transport.senders, dtype, size))
        if rendezvous is not None:
            join, firsts = Method("join_broadcast"), enumerate(range(1, rendezvous.size, parallel))
            await asyncio.gather(*(engines.submit(number, join, rendezvous, first) for number, first in firsts))
        return await ranks

    return run_async(connect_both())
