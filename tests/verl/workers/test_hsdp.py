"""Two nodes of two ranks: shards within a node, replicas across nodes, and the numbers of one rank."""

from __future__ import annotations

import gc
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.support.ranks import in_processes
from tests.support.service import free_port
from tests.verl.checkpoint.test_checkpoint import SETTINGS, everything, rank_packs
from tests.verl.workers.test_fsdp_engine import policy_loss, tiny_model, values
from verl.batch.packed import PackedBatch
from verl.single_controller.group import WorkerContext
from verl.workers.fsdp_engine import FSDPEngine
from verl.workers.model import PackedPolicy, decoder_layers
from verl.workers.rank import RankSpec, join

pytestmark = pytest.mark.long
PER_NODE = 2
SPEC = RankSpec("unused", torch.float64, 1.0, SETTINGS, ranks_per_node=PER_NODE)


def engine_on(mesh: DeviceMesh) -> FSDPEngine:
    module = PackedPolicy(tiny_model("qwen2", True, torch.float64))
    return FSDPEngine(module, decoder_layers(module), mesh, SETTINGS, torch.float64)


def scores(engine: FSDPEngine, packs: list[PackedBatch]) -> list[float]:
    """Log-probs of all trained tokens of all ranks, sorted: packs differ with the number of ranks."""
    own = engine.score(packs, lambda policy, packed: policy(packed, 1.0, False).logprobs)
    gathered: list[list[float]] = [[]] * dist.get_world_size()
    dist.all_gather_object(gathered, torch.cat(own).tolist())
    return sorted(chain.from_iterable(gathered))


def run_rank(rank: int, world: int, port: int, folder: Path, other: Path | None) -> None:
    """Three updates with a checkpoint after the second, and the third again from the checkpoint."""
    mesh = join(SPEC, WorkerContext(rank, world, port=port))
    outcome = compute(mesh, rank_packs(rank, world), folder, other)
    gc.collect()
    if rank == 0:
        torch.save(outcome, folder / "outcome.pt")
    dist.barrier()
    dist.destroy_process_group()


def compute(mesh: DeviceMesh, packs: list[PackedBatch], folder: Path, other: Path | None) -> dict[str, Any]:
    """other: a checkpoint to load at the end"""
    engine = engine_on(mesh)
    outcome: dict[str, Any] = {"shape": tuple(mesh.shape), "untrained": scores(engine, packs)}
    for step in (1, 2):
        outcome[f"metrics {step}"] = values(engine.update(packs, policy_loss))
        outcome[f"state {step}"] = everything(engine)
    engine.save(folder / "checkpoint")
    outcome["straight"] = values(engine.update(packs, policy_loss)), everything(engine), scores(engine, packs)
    resumed = engine_on(mesh)
    resumed.load(folder / "checkpoint")
    outcome["resumed"] = values(resumed.update(packs, policy_loss)), everything(resumed), scores(resumed, packs)
    if other:
        engine.load(other)
        outcome["other"] = everything(engine)
    return outcome


def outcome_of(world: int, folder: Path, other: Path | None = None) -> dict[str, Any]:
    folder.mkdir()
    in_processes(world, run_rank, world, free_port(), folder, other)
    found: dict[str, Any] = torch.load(folder / "outcome.pt", weights_only=False)
    return found


def test_two_nodes_of_two_ranks_equal_one_rank(tmp_path: Path) -> None:
    four = outcome_of(4, tmp_path / "four")
    one = outcome_of(1, tmp_path / "one", tmp_path / "four" / "checkpoint")
    assert (one["shape"], four["shape"]) == ((1,), (2, PER_NODE))
    for step in (1, 2):
        assert four[f"metrics {step}"] == pytest.approx(one[f"metrics {step}"], rel=1e-5)
        for name, expected in one[f"state {step}"].items():  # first moments after one update: the gradients
            torch.testing.assert_close(four[f"state {step}"][name], expected, rtol=1e-5, atol=1e-5, msg=name)
    assert four["untrained"] == pytest.approx(one["untrained"], abs=1e-5)
    assert four["straight"][2] == pytest.approx(one["straight"][2], abs=1e-4)
    assert four["metrics 2"]["loss"] < four["metrics 1"]["loss"]
    (metrics, state, logprobs), straight = four["resumed"], four["straight"]
    assert (metrics, logprobs) == (straight[0], straight[2])
    assert all(torch.equal(state[name], each) for name, each in straight[1].items())
    for name, expected in four["state 2"].items():  # loaded on one rank
        assert torch.equal(one["other"][name], expected), name
