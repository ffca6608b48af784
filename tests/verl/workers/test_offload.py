"""What is moved when: an engine whose moves are written down instead of made. Moves themselves need a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.verl.batch.test_packing import random_samples, tiny_model
from tests.verl.workers.test_fsdp_engine import policy_loss
from verl.algorithms.aggregate import Aggregation
from verl.batch.experience import with_loss_weights
from verl.batch.packed import PackedBatch
from verl.batch.packing import Shard, make_units
from verl.batch.samples import batch_of
from verl.transfer.shared_memory import SharedMemory
from verl.workers.critic_worker import CriticWorker
from verl.workers.fsdp_engine import FSDPEngine, Offload, Offloadable
from verl.workers.model import PackedPolicy, decoder_layers
from verl.workers.optim import OptimizerSettings
from verl.workers.policy_worker import PolicyWorker

GPU, HOST = torch.device("cuda"), torch.device("cpu")
BATCH = with_loss_weights(batch_of(random_samples(1, group_sizes=(2, 1))), Aggregation.TOKEN_SUM)
SHARD = Shard(BATCH, [make_units(BATCH, True, 1000)])
PACKS = list(SHARD)


def watched(moves: list[str], trained: bool) -> PolicyWorker:
    """A worker on the CPU whose engine takes its device for another."""
    module = PackedPolicy(tiny_model("qwen2", tied=True, dtype=torch.float32))
    settings = OptimizerSettings() if trained else None
    engine = FSDPEngine(module, decoder_layers(module), init_device_mesh("cpu", (1,)), settings)
    engine._params = Offloadable(lambda to: moves.append(f"params to {to}"), GPU, enabled=True)
    engine._states = Offloadable(lambda to: moves.append(f"states to {to}"), GPU, enabled=True)
    return PolicyWorker(engine, temperature=1.0)


def test_a_part_moves_only_when_it_is_elsewhere() -> None:
    moves: list[torch.device] = []
    part = Offloadable(moves.append, GPU, enabled=True)
    part.load()
    assert not moves
    for _ in range(2):
        part.offload()
    for _ in range(2):
        part.load()
    assert moves == [HOST, GPU]


@pytest.mark.parametrize(("device", "wanted"), [(GPU, False), (HOST, True)])
def test_nothing_moves_unless_it_is_wanted_and_there_is_a_device(device: torch.device, wanted: bool) -> None:
    moves: list[torch.device] = []
    part = Offloadable(moves.append, device, wanted)
    part.offload()
    part.load()
    assert not moves


@pytest.mark.long
def test_a_step_loads_what_it_needs_and_offloads_it_again(group: None, tmp_path: Path) -> None:
    moves: list[str] = []
    worker = watched(moves, trained=True)
    layouts = worker.connect(SharedMemory, torch.float32, 10**9)

    def moved() -> list[str]:
        seen = moves.copy()
        moves.clear()
        return seen

    assert not moves
    worker.engine.offload_all()  # as an engine is left when it is made
    assert moved() == ["params to cpu", "states to cpu"]
    for _ in range(2):
        worker.score(SHARD)
        assert moved() in ([], ["params to cuda"])
        for _ in range(2):
            worker.engine.update(PACKS, policy_loss)
        assert moved() in ([], ["states to cuda"])
        worker.begin_weight_sync()
        assert moved() == ["states to cpu"]
        for layout in layouts:
            worker.send_bucket(layout.number, 0)
        worker.score(SHARD)  # the canary
        assert not moves
        worker.end_weight_sync()
        assert moved() == ["params to cpu"]
    worker.engine.save(tmp_path / "actor")
    assert moved() == []
    worker.engine.load(tmp_path / "actor")
    assert moved() == ["params to cuda", "states to cuda"]


def test_a_reference_is_away_unless_it_scores(group: None) -> None:
    moves: list[str] = []
    worker = watched(moves, trained=False)
    worker.engine.offload_all()
    moves.clear()
    worker.score(SHARD)
    assert moves == ["params to cuda", "params to cpu"]


def test_a_critic_is_offloaded_between_the_updates_of_two_steps(group: None) -> None:
    moves: list[str] = []
    critic = CriticWorker(watched(moves, trained=True).engine, clip=0.5)
    for _ in range(2):
        critic.engine.update(PACKS, policy_loss)
    assert not moves
    critic.offload()
    assert moves == ["params to cpu", "states to cpu"]
    moves.clear()
    critic.engine.score(PACKS, lambda module, packed: module(packed, 1.0, False).logprobs)
    assert moves == ["params to cuda"]


def test_updates_go_on_with_tensors_that_lie_elsewhere(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A move to the CPU makes copies here, as a move between devices does."""

    def tensors(engine: FSDPEngine) -> list[torch.Tensor]:
        assert engine._optimizer is not None
        states = [each for state in engine._optimizer.state.values() for each in state.values() if each.ndim > 0]
        return [each.detach().to_local() for each in (*engine.module.parameters(), *states)]

    outcomes = []
    for moving in (False, True):
        torch.manual_seed(0)
        worker = watched([], trained=True)
        for _ in range(2):
            outcomes.append(worker.engine.update(PACKS, policy_loss).loss)
            if moving:
                before = tensors(worker.engine)  # held, so that no place is used again
                with monkeypatch.context() as patch:
                    patch.setattr(torch.Tensor, "to", lambda tensor, *_, **__: tensor.clone())
                    worker.engine._move_params(HOST)
                    worker.engine._move_states(HOST)
                old, new = ({each.data_ptr() for each in which} for which in (before, tensors(worker.engine)))
                assert len(old) > 10 and not old & new
    assert outcomes[:2] == outcomes[2:]


@pytest.mark.parametrize("shared", [True, False])
def test_cached_memory_is_freed_for_a_colocated_engine_only(
    group: None, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[str] = []
    worker = watched([], trained=True)
    worker.engine._shares_device, worker.engine._device = shared, GPU
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append("memory"))
    monkeypatch.setattr(PackedBatch, "to", lambda packed, device: packed)
    worker.score(SHARD)
    for _ in range(2):
        worker.engine.update(PACKS, policy_loss)
    assert not freed
    worker.begin_weight_sync()
    worker.end_weight_sync()
    assert freed == ["memory", "memory"] * shared


def test_a_move_to_the_host_is_waited_for(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    worker = watched([], trained=True)
    worker.engine._device = GPU
    monkeypatch.setattr(nn.Module, "to", lambda module, device, non_blocking: calls.append(f"{device} {non_blocking}"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    worker.engine._move_params(HOST)
    worker.engine._move_params(GPU)
    assert calls == ["cpu True", "wait", "cuda True"]


def test_on_a_cpu_nothing_moves(group: None) -> None:
    module = PackedPolicy(tiny_model("qwen2", tied=True, dtype=torch.float32))
    mesh = init_device_mesh("cpu", (1,))
    engine = FSDPEngine(module, decoder_layers(module), mesh, OptimizerSettings(), offload=Offload(True, True))
    engine.offload_all()
    assert not engine._params._offloaded and not engine._states._offloaded
