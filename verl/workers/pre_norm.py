"""Llama's decoder layer, whose residual additions other kernels take over, and which can return some positions alone.

Hidden states of a model are read at trained positions. Below the last layer all positions are needed, as keys and
values of others. In the last layer only attention sees other positions; what follows it (residual addition, norm, MLP)
is computed where a trained token is predicted. With shared prompts of 900 tokens and four responses of 250 that is half
of the positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

_LAYER = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")


class Addends(NamedTuple):
    """Hidden states that the next layer's norm adds up, in its own kernel."""

    branch: Tensor
    residual: Tensor


class AddNorm(Protocol):
    """(attention's output, residual, norm) -> (norm of their sum, their sum)"""

    def __call__(self, attended: Tensor, residual: Tensor, norm: Any) -> tuple[Tensor, Tensor]: ...


def add_norm(attended: Tensor, residual: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
    total = residual + attended
    return norm(total), total


class PreNormLayer:
    """The forward of a layer: x = h + attention(norm(h)), x + mlp(norm(x)).

    add_norm: how it adds and normalizes
    selects: whether it returns the positions `source` alone, [1, T, E] -> [1, A, E]
    leaves_sum: whether it returns `Addends`, unless it is recomputed in the backward, for which its input is kept
    adds_in_place: whether, without gradients, attention and MLP add their outputs to a `residual` that they are given
    """

    def __init__(self, module: Any, add_norm: AddNorm = add_norm, selects: bool = False) -> None:
        self.module, self.add_norm, self.selects = module, add_norm, selects
        self.leaves_sum = self.adds_in_place = False

    def __call__(
        self, hidden_states: Tensor | Addends, *, source: Tensor | None = None, **options: Any
    ) -> Tensor | Addends:
        module = self.module
        if isinstance(hidden_states, Addends):
            normalized, residual = self.add_norm(*hidden_states, module.input_layernorm)
        else:
            normalized, residual = module.input_layernorm(hidden_states), hidden_states
        if self.adds_in_place and not torch.is_grad_enabled():
            total, _ = module.self_attn(hidden_states=normalized, residual=residual, **options)
            (total,) = self._selected(source, total)
            added: Tensor = module.mlp(module.post_attention_layernorm(total), residual=total)
            return added
        attended, _ = module.self_attn(hidden_states=normalized, **options)
        attended, residual = self._selected(source, attended, residual)
        normalized, residual = self.add_norm(attended, residual, module.post_attention_layernorm)
        addends = Addends(module.mlp(normalized), residual)
        recomputed = module.training and getattr(module, "gradient_checkpointing", False)
        return addends if self.leaves_sum and not recomputed else addends.residual + addends.branch

    def _selected(self, source: Tensor | None, *hidden_states: Tensor) -> Sequence[Tensor]:
        if not self.selects or source is None:
            return hidden_states
        return [each.squeeze(0)[source][None] for each in hidden_states]


def select_in_last_layer(decoder: Any) -> None:
    """Let the last layer return the positions that are asked for, if it is such a layer."""
    for layer in _last(decoder):
        if isinstance(layer.forward, PreNormLayer):
            layer.forward.selects = True
        elif is_pre_norm_layer(layer):
            layer.forward = PreNormLayer(layer, selects=True)


def selects_in_last_layer(decoder: Any) -> bool:
    """Whether the decoder returns the positions `source` alone."""
    return any(isinstance(layer.forward, PreNormLayer) and layer.forward.selects for layer in _last(decoder))


def selecting_parameters(decoder: Any) -> int:
    """Parameters of the MLP that is applied at those positions alone; 0 if there is none."""
    layers = _last(decoder) if selects_in_last_layer(decoder) else []
    return sum(each.numel() for layer in layers for each in layer.mlp.parameters())


def _last(decoder: Any) -> list[Any]:
    return list(getattr(decoder, "layers", []))[-1:]


def is_pre_norm_layer(module: nn.Module) -> bool:
    """Whether the module computes what `PreNormLayer` does: tried with matrices in place of its parts."""
    if not all(hasattr(module, name) for name in _LAYER):
        return False
    generator = torch.Generator("cpu").manual_seed(0)
    shapes = ((1, 3, 4), *[(4, 4)] * 4)
    hidden, *matrices = (torch.randn(each, generator=generator, device="cpu") for each in shapes)
    before, attention, after, mlp = (partial(linear, weight=each) for each in matrices)
    parts = (before, lambda hidden_states, **_: (attention(hidden_states), None), after, mlp)
    try:
        found = type(module).forward(SimpleNamespace(**dict(zip(_LAYER, parts, strict=True))), hidden)
    except (AttributeError, TypeError, ValueError):  # it has further parts, arguments or results
        return False
    middle = hidden + attention(before(hidden))
    return isinstance(found, Tensor) and torch.allclose(found, middle + mlp(after(middle)))
