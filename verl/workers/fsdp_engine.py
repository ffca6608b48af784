"""The training engine: FSDP2 around a policy or a critic. The only file that knows FSDP.

Parameters are DTensors on every device, one rank included: float32 masters, sharded one unit per decoder layer,
computed in `compute_dtype`, gradients reduced in float32. Losses arrive as sums whose weights already hold the global
denominators (algorithms/aggregate.py), so gradients are summed over ranks, not averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from verl.batch import PackedBatch
from verl.workers.optim import OptimizerSettings, build_optimizer

PackLoss = Callable[[Any, PackedBatch], tuple[Tensor, dict[str, Tensor]]]


class FSDPEngine:
    """One rank's share of a sharded module and its optimizer."""

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[nn.Module],
        mesh: DeviceMesh,
        optimizer: OptimizerSettings | None = None,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Shard `module` in place over the mesh, each of `layers` as a unit; without `optimizer` it is only scored."""
        precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        if all(parameter.dtype == compute_dtype for parameter in module.parameters()):
            precision = MixedPrecisionPolicy()
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=precision)
        self.module = module
        fully_shard(module, mesh=mesh, mp_policy=precision)
        self._mesh = mesh
        self._settings = optimizer
        self._optimizer, self._scheduler = None, None
        if optimizer is not None:
            self._optimizer, self._scheduler = build_optimizer(module.parameters(), optimizer)

    @torch.no_grad()
    def score(self, packs: Iterable[PackedBatch], forward: Callable[[Any, PackedBatch], Tensor]) -> list[Tensor]:
        """`forward(module, pack)` of every pack, without gradients, on the CPU."""
        self.module.eval()
        return [forward(self.module, packed).cpu() for packed in packs]

    def update(self, packs: Sequence[PackedBatch], loss: PackLoss) -> dict[str, float]:
        """One optimizer step over the packs of all ranks; every rank brings the same number of packs.

        loss: (module, pack) -> (the pack's share of the global loss, further sums to report)
        Returns the sums over all packs and ranks, with "loss", "grad_norm" (before clipping) and "lr".
        """
        assert self._optimizer is not None and self._scheduler is not None and self._settings is not None
        self.module.train()
        sums: dict[str, Tensor] = {}
        for packed in packs:
            value, facts = loss(self.module, packed)
            (value * self._mesh.size()).backward()  # FSDP averages over ranks; the global denominator is in the loss
            for name, fact in {"loss": value.detach(), **facts}.items():
                sums[name] = sums.get(name, torch.zeros((), dtype=torch.float64)) + fact.double().cpu()
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self._settings.max_grad_norm)
        grad_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        lr = self._scheduler.get_last_lr()[0]
        self._optimizer.step()
        self._scheduler.step()
        self._optimizer.zero_grad()
        return {**self._summed(sums), "grad_norm": float(grad_norm), "lr": float(lr)}

    def _summed(self, sums: dict[str, Tensor]) -> dict[str, float]:
        together = torch.stack([sums[name] for name in sorted(sums)])
        dist.all_reduce(together, group=self._mesh.get_group())
        return dict(zip(sorted(sums), together.tolist(), strict=True))

    def export_weights(self, named: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, Tensor]]:
        """Full tensors, one at a time, in the order given; a collective, so every rank must go through all of it."""
        for name, parameter in named:
            yield name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
