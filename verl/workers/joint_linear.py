"""Linear layers that read the same input, with one gradient of it.

Autograd adds up the input's gradients from each layer by kernels that read and write whole tensors. Here every further
matrix product adds to the first one's result, which costs no traffic of its own. An adapter's products do, too: to the
layer's output and to that gradient. All adapters' first factors are one product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


def joint_linear(hidden: Tensor, modules: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
    """The outputs of all modules. hidden: [.., inputs]"""
    apply: Any = _JointLinear.apply
    outputs: tuple[Tensor, ...] = apply(hidden, *(each for module in modules for each in (module.weight, module.bias)))
    return outputs


class Part(NamedTuple):
    """A linear layer with frozen weights, and its adapter if it has one: weight + scale * up @ down."""

    weight: Tensor  # [outputs, inputs]
    bias: Tensor | None
    down: Tensor | None = None  # [rank, inputs]
    up: Tensor | None = None  # [outputs, rank]
    scale: float = 0.0


def joint_adapted(hidden: Tensor, parts: Sequence[Part]) -> tuple[Tensor, ...]:
    """The outputs of all parts, as `joint_linear`; gradients of the input and of the adapters."""
    apply: Any = _JointAdapted.apply
    adapted = [each for each in parts if each.down is not None]
    factors = [each for part in adapted for each in (part.down, part.up)]
    outputs: tuple[Tensor, ...] = apply(hidden, parts, *factors)
    return outputs


class _JointAdapted(torch.autograd.Function):
    """factors: down, up of every part with an adapter. Shape legend: T tokens, E inputs, F outputs, R all ranks."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, parts: Sequence[Part], *factors: Tensor) -> tuple[Tensor, ...]:
        hidden_TE, down_RE = hidden.flatten(0, -2), torch.cat(factors[::2])
        ranks = [len(each) for each in factors[::2]]
        inner_TR = hidden_TE @ down_RE.T
        inner, outputs = iter(inner_TR.split(ranks, 1)), []
        for part in parts:
            output = linear(hidden, part.weight, part.bias)
            if part.up is not None:
                output.flatten(0, -2).addmm_(next(inner), part.up.T, alpha=part.scale)
            outputs.append(output)
        ctx.save_for_backward(hidden, inner_TR, *(each.weight for each in parts), *factors)
        ctx.scales, ctx.ranks = [None if each.up is None else each.scale for each in parts], ranks
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, inner_TR, *rest = ctx.saved_tensors
        weights, factors = rest[: len(ctx.scales)], rest[len(ctx.scales) :]
        hidden_TE, grads_TF = hidden.flatten(0, -2), [each.flatten(0, -2) for each in grads]
        adapted = [(grad_TF, scale) for grad_TF, scale in zip(grads_TF, ctx.scales, strict=True) if scale is not None]
        down_RE, ups = torch.cat(factors[::2]), factors[1::2]
        of_inner_TR = torch.cat(
            [(grad_TF @ up).mul_(scale) for (grad_TF, scale), up in zip(adapted, ups, strict=True)], 1
        )
        of_downs = (of_inner_TR.T @ hidden_TE).split(ctx.ranks)
        of_factors: list[Tensor] = []
        for (grad_TF, scale), of_down, inner in zip(adapted, of_downs, inner_TR.split(ctx.ranks, 1), strict=True):
            of_factors += [of_down, (grad_TF.T @ inner).mul_(scale)]
        if not ctx.needs_input_grad[0]:
            return None, None, *of_factors
        grad_TE = of_inner_TR @ down_RE
        for grad_TF, weight in zip(grads_TF, weights, strict=True):
            grad_TE.addmm_(grad_TF, weight)
        return grad_TE.view_as(hidden), None, *of_factors


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
