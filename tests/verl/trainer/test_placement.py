"""Which GPUs ranks and engines get, in a real Ray whose GPUs are made up, on one node and on two.

The workers are stand-ins that record their devices; everything before them is `start_workers` itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.placed import Devices, devices, fake_engine, fake_rank
from verl.build.algorithm import build_algorithm
from verl.build.workers import Workers, start_workers
from verl.config.load import load_config
from verl.single_controller.ray import Bundle, Cluster, PlacementGroup, ray, remove_placement_group
from verl.transfer.gpu import CudaIpc
from verl.workers.rank import RankSpec

pytestmark = pytest.mark.long


def checked_spec(**fields: Any) -> None:
    """Makes a specification, which no rank gets: to receive it, a process has to import torch."""
    RankSpec(**fields)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl.build.ranks.RankSpec", checked_spec)
    monkeypatch.setattr("verl.build.ranks.build_rank", fake_rank)
    monkeypatch.setattr("verl.build.workers.start_engine", fake_engine)


class TidyCluster(Cluster):
    """Remembers its placement groups, which hold their GPUs until they are removed."""

    def pool(self, bundles: Sequence[Bundle], strategy: str = "PACK") -> PlacementGroup:
        _pools.append(super().pool(bundles, strategy))
        return _pools[-1]


_pools: list[PlacementGroup] = []


@contextmanager
def started(cluster: Cluster, model: Path, *overrides: str) -> Iterator[tuple[Workers, list[Devices], list[Devices]]]:
    """The workers, the devices of each rank and of each engine."""
    given = (
        "rollout.gpu_memory_utilization=0.5",
        "rollout.max_num_seqs=64",
        "model.enable_gradient_checkpointing=false",
    )
    always = (f"model.path={model}", "data.train_files=[unused]", *given)
    config = load_config([*always, *overrides])
    workers = start_workers(config, cluster, build_algorithm(config.algorithm, 1024, 0), "cuda", 10)
    yield workers, workers.trainer.call(devices), workers.engines.call(devices)
    workers.close()
    while _pools:
        remove_placement_group(_pools.pop())


def sources(workers: Workers) -> list[list[int]]:
    return [list(ranks) for ranks in workers.transport.sources]


def ipc_senders(workers: Workers) -> list[int]:
    """The ranks that send by CUDA IPC; the others only take part in gathering."""
    return [rank for rank, sender in enumerate(workers.transport.senders) if sender is CudaIpc]


def together(groups: Sequence[Devices]) -> list[str]:
    return sorted(device for group in groups for device in group)


def test_one_node(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Colocated engines have the devices of their own ranks, where the user has numbered the devices anew."""
    order = "6,2,5,1,9,3,8,4"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", order)
    monkeypatch.setattr(ray, "init", partial(ray.init, num_gpus=8))
    on_four, parallel = "trainer.n_gpus_per_node=4", "rollout.tensor_model_parallel_size=2"
    with TidyCluster.start(20) as cluster:
        with started(cluster, model, on_four) as (workers, ranks, engines):
            assert engines == ranks and len(set(ranks)) == 4 and set(together(ranks)) <= set(order.split(","))
            assert sources(workers) == [[0], [1], [2], [3]] and ipc_senders(workers) == [0, 1, 2, 3]
        with started(cluster, model, on_four, parallel) as (workers, ranks, engines):
            assert engines == [ranks[0] + ranks[1], ranks[2] + ranks[3]] and len(set(ranks)) == 4
            assert sources(workers) == [[0, 1], [2, 3]] and ipc_senders(workers) == [0, 1, 2, 3]
        with started(cluster, model, on_four, parallel, "rollout.num_engines=1") as (workers, ranks, engines):
            assert engines == [ranks[0] + ranks[1]]
            assert sources(workers) == [[0, 1]] and ipc_senders(workers) == [0, 1]
        separate = (on_four, parallel, "rollout.placement=separate", "rollout.num_engines=2")
        with started(cluster, model, *separate) as (workers, ranks, engines):
            assert together([*ranks, *engines]) == sorted(order.split(","))  # each of the eight once
            assert [len(each) for each in engines] == [2, 2]
            assert sources(workers) == [[0], [0]] and ipc_senders(workers) == []
            assert workers.transport.rendezvous is not None and workers.transport.rendezvous.size == 1 + 2 * 2


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from ray.cluster_utils import Cluster as RayCluster

    nodes = RayCluster()
    for _ in range(2):
        nodes.add_node(num_cpus=12, num_gpus=4)
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    yield
    nodes.shutdown()


def test_two_nodes(two_nodes: None, model: Path) -> None:
    """Engines of two devices never span nodes; separate ones take the devices that the ranks of a node leave."""
    overrides = ("trainer.nnodes=2", "rollout.tensor_model_parallel_size=2")
    with TidyCluster.start(20, join=True) as cluster:
        assert cluster.num_gpus == 8.0
        with started(cluster, model, *overrides, "trainer.n_gpus_per_node=4") as (workers, ranks, engines):
            nodes = workers.trainer.nodes
            assert nodes == [nodes[0]] * 4 + [nodes[4]] * 4 and nodes[0] != nodes[4]
            assert workers.engines.nodes == nodes[::2]
            assert engines == [ranks[first] + ranks[first + 1] for first in (0, 2, 4, 6)]
            assert together(ranks[:4]) == together(ranks[4:]) == ["0", "1", "2", "3"]
            assert sources(workers) == [[0, 1], [2, 3], [4, 5], [6, 7]]
        separate = ("trainer.n_gpus_per_node=2", "rollout.placement=separate", "rollout.num_engines=2")
        with started(cluster, model, *overrides, *separate) as (workers, ranks, engines):
            assert sorted(workers.engines.nodes) == sorted(set(workers.trainer.nodes))
            on = [*zip(workers.trainer.nodes, ranks, strict=True), *zip(workers.engines.nodes, engines, strict=True)]
            used = sorted((node, device) for node, group in on for device in group)
            assert len(set(used)) == len(used) == 8
            assert workers.transport.rendezvous is not None and workers.transport.rendezvous.size == 1 + 2 * 2
