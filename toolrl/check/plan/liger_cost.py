"""Stand-ins for the functions of liger_kernel.ops on tensors without data, so that a fused model can be counted.

As liger-kernel 0.8: allocations, what is saved, what is written in place. Every kernel is one operator; what it moves
is its inputs and outputs once, or as in TRAFFIC of `cost.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

_LIBRARY = torch.library.Library("liger", "DEF")
_KERNELS = torch.ops.liger


def _define(schema: str, on_meta: Any) -> None:
    _LIBRARY.define(schema)
    _LIBRARY.impl(schema.partition("(")[0], on_meta, "Meta")


def _norm(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden), hidden.new_empty(hidden.shape[:-1], dtype=torch.float32)


_define("norm(Tensor hidden, Tensor weight) -> (Tensor, Tensor)", _norm)
_define(
    "norm_backward(Tensor grad, Tensor hidden, Tensor weight, Tensor rstd, Tensor(a!) grad_hidden) -> Tensor",
    lambda grad, hidden, weight, rstd, grad_hidden: torch.empty_like(weight),
)
_define("rotary(Tensor(a!) query, Tensor(b!) key, Tensor cos, Tensor sin) -> ()", lambda query, key, cos, sin: None)
_define("silu_mul(Tensor gate, Tensor up) -> Tensor", lambda gate, up: torch.empty_like(gate))
_define("silu_mul_backward(Tensor grad, Tensor(a!) gate, Tensor(b!) up) -> ()", lambda grad, gate, up: None)


class LigerRMSNormFunction(Function):
    """Saves its input and a number per row; the gradient is a new tensor, set to zero first (in_place=False)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, *options: Any) -> Tensor:
        hidden = hidden.contiguous()
        normalized: Tensor
        normalized, rstd = _KERNELS.norm(hidden, weight)
        ctx.save_for_backward(hidden, weight, rstd)
        ctx.num_options = len(options)
        return normalized

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden = torch.zeros_like(grads[0].contiguous())
        grad_weight = _KERNELS.norm_backward(grads[0].contiguous(), *ctx.saved_tensors, grad_hidden)
        return grad_hidden, grad_weight, *(None,) * ctx.num_options


def rms_norm_forward(hidden: Tensor, weight: Tensor, *options: Any) -> tuple[Any, ...]:
    """(normalized, input, a number per row, three settings of the launch)"""
    normalized, rstd = _KERNELS.norm(hidden, weight)
    return normalized, hidden, rstd, *[None] * 3


class LigerRopeFunction(Function):
    """In place, forward and backward, where heads of a token lie together."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _rotate(query, key, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *_rotate(*grads, *ctx.saved_tensors), None, None


def _rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    query, key = query.transpose(1, 2).contiguous(), key.transpose(1, 2).contiguous()
    _KERNELS.rotary(query, key, cos, sin)
    return query.transpose(1, 2), key.transpose(1, 2)


class LigerSiLUMulFunction(Function):
    """Saves both factors, over which the backward writes their gradients."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        product: Tensor = _KERNELS.silu_mul(gate, up)
        return product

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        gate, up = ctx.saved_tensors
        _KERNELS.silu_mul_backward(grads[0].contiguous(), gate, up)
        return gate, up
