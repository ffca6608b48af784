"""Muon (Jordan et al. 2024): momentum, orthogonalized by Newton-Schulz iterations, for matrices."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalized(matrix: Tensor, steps: int = 5) -> Tensor:
    """Roughly the nearest matrix with singular values of one."""
    a, b, c = _COEFFICIENTS
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = (wide / (wide.norm() + 1e-7)).bfloat16()
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    x = x.to(matrix.dtype)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class Muon(torch.optim.Optimizer):
    """With Nesterov momentum."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update."""
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is None:
                    continue
                momentum = self.state[each].setdefault("momentum", torch.zeros_like(each))
                momentum.lerp_(each.grad, 1 - group["momentum"])
                update = orthogonalized(each.grad.lerp(momentum, group["momentum"]))
                each.add_(update, alpha=-group["lr"] * max(1, each.shape[0] / each.shape[1]) ** 0.5)
