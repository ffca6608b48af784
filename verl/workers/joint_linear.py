"""Linear layers that read the same input, with one gradient of it.

Autograd adds up the input's gradients from each layer by kernels that read and write whole tensors. Here every further
matrix product adds to the first one's result, which costs no traffic of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


def joint_linear(hidden: Tensor, modules: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
    """The outputs of all modules. hidden: [.., inputs]"""
    apply: Any = _JointLinear.apply
    outputs: tuple[Tensor, ...] = apply(hidden, *(each for module in modules for each in (module.weight, module.bias)))
    return outputs


class _JointLinear(torch.autograd.Function):
    """parameters: weight, bias or None, weight, bias or None, .."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = parameters[::2], parameters[1::2]
        ctx.save_for_backward(hidden, *weights)
        ctx.biased = [each is not None for each in biases]
        return tuple(linear(hidden, weight, bias) for weight, bias in zip(weights, biases, strict=True))  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, *weights = ctx.saved_tensors
        hidden_TE = hidden.flatten(0, -2)
        grads_TF = [each.flatten(0, -2) for each in grads]
        grad_TE = grads_TF[0] @ weights[0]
        for grad_TF, weight in zip(grads_TF[1:], weights[1:], strict=True):
            grad_TE.addmm_(grad_TF, weight)
        of_parameters: list[Tensor | None] = []
        for grad_TF, biased in zip(grads_TF, ctx.biased, strict=True):
            of_parameters += [grad_TF.T @ hidden_TE, grad_TF.sum(0) if biased else None]
        return grad_TE.view_as(hidden), *of_parameters
