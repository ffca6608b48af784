"""A rank's shard of a weight, and how one rank gathers the whole weight, while training goes on if it is a copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verl.nf4 import Nf4Linear

_HOST = torch.device("cpu")


class WeightShard(NamedTuple):
    held: Tensor | Nf4Linear  # rows of the weight, or all of it
    shape: torch.Size  # of the weight
    ranks: Sequence[int] = ()  # that hold its rows, split as by `torch.chunk`; none if each rank holds all
    lasts: bool = False  # whether training leaves `held` as it is, in host memory

    @classmethod
    def of(cls, weight: Tensor | Nf4Linear) -> Self:
        ranks: Sequence[int] = ()
        held = weight
        if isinstance(weight, DTensor):
            mesh, held = weight.device_mesh, weight.to_local()
            if mesh.shape[-1] > 1:
                ranks = dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1))
        is_frozen = isinstance(weight, nn.Parameter) and not weight.requires_grad
        return cls(held, weight.shape, ranks, is_frozen and held.device == _HOST)

    def copied(self, writer: int, dtype: torch.dtype | None = None) -> Self:
        """What `gathered` needs, copied to host memory. dtype: that of floating-point numbers, None: as they are"""
        if not self._needed(writer):
            return self._replace(held=torch.empty(0, device="meta"))
        return self if self.lasts else self._replace(held=_on_host(self.held, dtype, copy=True))

    def copy_bytes(self, writer: int, dtype: torch.dtype | None = None) -> int:
        """Size of what `copied` copies."""
        if self.lasts or not self._needed(writer):
            return 0
        own = self.held.dtype
        return self.held.shape.numel() * (dtype if dtype and own.is_floating_point else own).itemsize

    def _needed(self, writer: int) -> bool:
        """Whether this rank has a part in the weight that the writer gathers."""
        rank = dist.get_rank()
        return rank == writer or (rank in self.ranks and writer in self.ranks)

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
            elif rows.numel():
                dist.recv(rows, source, group)
        return full


def _on_host(weight: Tensor | Nf4Linear, dtype: torch.dtype | None, copy: bool = False) -> Tensor:
    tensor = weight.detach()
    return tensor.to(_HOST, dtype if tensor.is_floating_point() else None, copy=copy)
