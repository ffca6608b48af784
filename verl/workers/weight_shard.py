"""A rank's shard of a weight, and how one rank gathers the whole weight, while training goes on if it is a copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl.nf4 import Nf4Linear

_HOST = torch.device("cpu")


class WeightShard(NamedTuple):
    held: Tensor | Nf4Linear  # rows of the weight, or all of it
    shape: torch.Size  # of the weight
    ranks: Sequence[int] = ()  # that hold its rows, split as by `torch.chunk`; none if each rank holds all

    @classmethod
    def of(cls, weight: Tensor | Nf4Linear) -> Self:
        if not isinstance(weight, DTensor) or weight.device_mesh.shape[-1] == 1:
            return cls(weight.to_local() if isinstance(weight, DTensor) else weight, weight.shape)
        mesh = weight.device_mesh
        return cls(weight.to_local(), weight.shape, dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1)))

    def copied(self, writer: int, dtype: torch.dtype | None = None) -> Self:
        """A copy in host memory of what `gathered` needs. dtype: that of floating-point numbers, None: as they are"""
        rank = dist.get_rank()
        if rank == writer or (rank in self.ranks and writer in self.ranks):
            return self._replace(held=_on_host(self.held, dtype, copy=True))
        return self._replace(held=torch.empty(0, device="meta"))

    def gathered(self, writer: int, dtype: torch.dtype | None = None, group: dist.ProcessGroup | None = None) -> Tensor:
        """The weight in host memory on the rank `writer`; elsewhere its shape, on the meta device.

        Collective. group: a Gloo group of all ranks, default the default one
        """
        if dist.get_rank() == writer:
            held = _on_host(self.held, dtype)
            return self._received(held, group) if self.ranks else held
        if writer in self.ranks and (held := _on_host(self.held, dtype)).numel():
            dist.send(held.contiguous(), writer, group)
        return torch.empty(self.shape, dtype=dtype, device="meta")

    def _received(self, held: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        full = held.new_empty(self.shape)
        most = math.ceil(len(full) / len(self.ranks))
        for source, rows in zip(self.ranks, full.split(most), strict=False):  # the last ranks may have none
            if source == dist.get_rank():
                rows.copy_(held)
            else:
                dist.recv(rows, source, group)
        return full


def _on_host(weight: Tensor | Nf4Linear, dtype: torch.dtype | None, copy: bool = False) -> Tensor:
    tensor = weight.detach()
    return tensor.to(_HOST, dtype if tensor.is_floating_point() else None, copy=copy)
