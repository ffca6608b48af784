"""A checkpoint is written while training goes on: what is written is the state from before."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.support.ranks import in_ranks
from tests.support.tiny import save_tiny_model
from tests.verl.batch.test_packing import tiny_model
from tests.verl.checkpoint.test_checkpoint import SETTINGS, TOKENIZER, everything, make_engine, rank_packs, train
from verl.errors import DataError
from verl.lora import Lora, add_adapter
from verl.workers import rank as ranks
from verl.workers.critic_worker import CriticWorker
from verl.workers.fsdp_engine import FSDPEngine
from verl.workers.model import PackedPolicy, decoder_layers
from verl.workers.policy_worker import PolicyWorker
from verl.workers.rank import RankSpec, TrainingRank

MODELS = {"actor": "policy", "critic": "critic"}


def trained_rank(world: int, model: Path) -> TrainingRank:
    spec = RankSpec(str(model), torch.float64, 1.0, SETTINGS, tokenizer_path=TOKENIZER)
    policy, critic = PolicyWorker(make_engine("policy", world), 1.0), CriticWorker(make_engine("critic", world), 0.5)
    rank = TrainingRank(spec, policy, None, critic, None, dist.new_group(backend="gloo"))
    learn(rank, world)
    return rank


def learn(rank: TrainingRank, world: int) -> None:
    for name, engine in zip(MODELS.values(), rank.trained, strict=True):
        train(engine, name, rank_packs(dist.get_rank(), world), 2)


def written(folder: Path, world: int) -> dict[str, Any]:
    """All weights and states that a checkpoint restores, and the bytes of the exported model's files."""
    found: dict[str, Any] = {path.name: path.read_bytes() for path in (folder / "hf").iterdir()}
    for part, name in MODELS.items():
        engine = make_engine(name, world)
        engine.load(folder / part)
        found |= {f"{part} {name}": each for name, each in everything(engine).items()}
    return found


def equal(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(each, wanted[name]) if isinstance(each, torch.Tensor) else each == wanted[name]
        for name, each in found.items()
    )


def while_training_goes_on(number: int, world: int, folder: Path) -> None:
    rank = trained_rank(world, folder / "model")
    rank.save(folder / "at_once")
    before = written(folder / "at_once", world)
    rank.stage(folder / "staged")
    assert not (folder / "staged" / "actor" / ".metadata").exists()
    learn(rank, world)
    writing = Thread(target=rank.write)
    writing.start()
    learn(rank, world)  # with collectives of its own
    writing.join()
    assert equal(written(folder / "staged", world), before)
    rank.save(folder / "after")
    assert not equal(written(folder / "after", world), before)


def while_an_adapter_is_trained(number: int, world: int, folder: Path) -> None:
    lora, module = (
        Lora(rank=4, alpha=8.0, targets=("all-linear",)),
        PackedPolicy(tiny_model("qwen2", True, torch.float32)),
    )
    add_adapter(module.model, lora)
    engine = FSDPEngine(module, decoder_layers(module), init_device_mesh("cpu", (world,)), SETTINGS)
    spec = RankSpec(str(folder / "model"), torch.float32, 1.0, SETTINGS, tokenizer_path=TOKENIZER, lora=lora)
    rank = TrainingRank(spec, PolicyWorker(engine, 1.0), None, None, None, dist.new_group(backend="gloo"))
    train(engine, "policy", rank_packs(number, world), 2)
    rank.save(folder / "at_once")
    rank.stage(folder / "staged")
    train(engine, "policy", rank_packs(number, world), 2)
    writing = Thread(target=rank.write)
    writing.start()
    train(engine, "policy", rank_packs(number, world), 2)
    writing.join()
    rank.save(folder / "after")
    for part in ("adapter/adapter_model.safetensors", "hf/model.safetensors"):
        staged, before, after = ((folder / each / part).read_bytes() for each in ("staged", "at_once", "after"))
        assert staged == before != after


def while_the_copy_takes_long(number: int, world: int, folder: Path) -> None:
    rank, released = trained_rank(world, folder / "model"), Event()
    rank.save(folder / "at_once")
    before = written(folder / "at_once", world)
    for engine in rank.trained:
        engine._copier.submit(released.wait)
    rank.stage(folder / "staged")
    learning = Thread(target=learn, args=(rank, world))
    learning.start()
    time.sleep(1)
    waits = learning.is_alive()
    released.set()
    learning.join()
    assert waits  # at its first optimizer step
    rank.write()
    assert equal(written(folder / "staged", world), before)


def without_room(number: int, world: int, folder: Path) -> None:
    rank = trained_rank(world, folder / "model")
    if number == world - 1:
        ranks.free_memory = lambda: 1000  # type: ignore[assignment]  # this process ends with the test
    rank.stage(folder / "staged")
    dist.barrier()
    assert not rank.staged and (folder / "staged" / "actor" / ".metadata").exists()
    rank.write()
    rank.save(folder / "at_once")
    assert equal(written(folder / "staged", world), written(folder / "at_once", world))


def without_a_place(number: int, world: int, folder: Path) -> None:
    rank = trained_rank(world, folder / "model")
    for part, problem in (("hf", "model.safetensors|hf"), ("actor", "actor")):
        staged = folder / f"lost_{part}"
        rank.stage(staged)
        dist.barrier()
        if number == 0:
            shutil.rmtree(staged / part, ignore_errors=True)
            (staged / part).touch()
        dist.barrier()
        with pytest.raises(DataError, match=problem):  # on every rank
            rank.write()
        assert not rank.staged
    rank.stage(folder / "again")
    rank.write()
    dist.barrier()
    assert (folder / "again" / "hf" / "model.safetensors").exists()


def without_memory(number: int, world: int, folder: Path) -> None:
    rank = trained_rank(world, folder / "model")
    rank.stage(folder / "staged")
    failed = Future[dict[str, Any]]()
    failed.set_exception(MemoryError("no room"))
    if number == world - 1:
        write = rank.staged.pop()
        states, *more = write.args  # type: ignore[attr-defined]
        rank.staged.append(partial(write.func, {**states, folder / "staged" / "actor": failed}, *more))  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=r"cannot be copied to host memory \(no room\)"):  # on every rank
        rank.write()


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    "case",
    [
        while_training_goes_on,
        while_an_adapter_is_trained,
        while_the_copy_takes_long,
        without_room,
        without_a_place,
        without_memory,
    ],
)
def test_staged(case: Any, num_ranks: int, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    in_ranks(num_ranks, case, tmp_path)
