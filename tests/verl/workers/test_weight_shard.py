"""A weight that one rank gathers is the whole weight, of every split, and of copies that of before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.support.ranks import in_ranks
from verl.nf4 import Nf4Linear, hold_in_four_bits
from verl.workers.weight_shard import WeightShard

SHAPES = [(1,), (3, 2), (4, 0), (4, 1, 3), (7, 5), (8, 2)]  # rows for none, some or all of four ranks


def check_size(shard: WeightShard, writer: int, dtype: torch.dtype | None, copy: WeightShard) -> None:
    assert isinstance(copy.held, torch.Tensor)
    assert shard.copy_bytes(writer, dtype) == (0 if copy.held.is_meta else copy.held.nbytes)


def sharded(whole: torch.Tensor, mesh_shape: tuple[int, ...]) -> DTensor:
    mesh = init_device_mesh("cpu", mesh_shape)
    return distribute_tensor(whole.clone(), mesh, [Replicate()] * (len(mesh_shape) - 1) + [Shard(0)])


def gathers(number: int, world: int, folder: Path) -> None:
    group = dist.new_group(backend="gloo")
    for mesh_shape in ((world,), (2, world // 2), (world, 1)):
        for shape in SHAPES:
            whole = torch.randn(shape, generator=torch.Generator().manual_seed(7))
            shard = WeightShard.of(weight := sharded(whole, mesh_shape))
            for writer in range(world):
                copies = shard.copied(writer), shard.copied(writer, torch.bfloat16)
                check_size(shard, writer, None, copies[0])
                check_size(shard, writer, torch.bfloat16, copies[1])
                with torch.no_grad():
                    weight.to_local().add_(1)
                now, exact, rounded = (each.gathered(writer, group=group) for each in (shard, *copies))
                at_once = shard.gathered(writer, torch.bfloat16)
                assert {each.shape for each in (now, exact, rounded, at_once)} == {whole.shape}
                assert now.is_meta == (number != writer)
                if number == writer:
                    assert torch.equal(exact, whole) and torch.equal(rounded, whole.bfloat16())
                    assert torch.equal(now, whole + 1) and torch.equal(at_once, (whole + 1).bfloat16())
                whole = whole + 1


def of_a_whole_weight(number: int, world: int, folder: Path) -> None:
    with torch.device("meta"):
        hold_in_four_bits(layer := torch.nn.Linear(8, 6))
    assert isinstance(layer, Nf4Linear)
    layer.to_empty(device="cpu")
    layer.round_weight(wanted := torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).bfloat16())
    wanted, numbers = layer.detach(), torch.arange(5)
    for writer in range(world):
        for held, whole in ((layer, wanted), (numbers, numbers)):
            copy = WeightShard.of(held).copied(writer, torch.bfloat16)
            check_size(WeightShard.of(held), writer, torch.bfloat16, copy)
            gathered = copy.gathered(writer, torch.bfloat16)
            assert gathered.is_meta if number != writer else torch.equal(gathered, whole)


def of_a_frozen_weight(number: int, world: int, folder: Path) -> None:
    whole = torch.randn(7, 3, generator=torch.Generator().manual_seed(2))
    for is_trained in (False, True):
        weight = torch.nn.Parameter(sharded(whole, (world,)), requires_grad=is_trained)
        shard = WeightShard.of(weight)
        copy = shard.copied(1, torch.bfloat16)
        assert (copy.held is shard.held) == (not is_trained)
        assert shard.copy_bytes(1, torch.bfloat16) == 2 * is_trained * shard.held.shape.numel()
        gathered = copy.gathered(1, torch.bfloat16)
        assert gathered.is_meta if number != 1 else torch.equal(gathered, whole.bfloat16())


@pytest.mark.long
def test_a_frozen_weight_in_host_memory_is_not_copied(tmp_path: Path) -> None:
    in_ranks(2, of_a_frozen_weight, tmp_path)


@pytest.mark.long
def test_one_rank_gathers_the_weight(tmp_path: Path) -> None:
    in_ranks(4, gathers, tmp_path)


@pytest.mark.long
def test_a_weight_that_each_rank_holds_comes_from_the_writer(tmp_path: Path) -> None:
    in_ranks(2, of_a_whole_weight, tmp_path)
