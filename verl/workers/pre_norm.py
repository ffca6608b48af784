"""Llama's decoder layer, in parts that kernels can replace, and able to return some positions alone.

Hidden states of a model are read at trained positions. Below the last layer all positions are needed, as keys and
values of others. In the last layer only attention sees other positions; what follows it (residual addition, norm, MLP)
is computed where a trained token is predicted. With shared prompts of 900 tokens and four responses of 250 that is half
of the positions.
"""

from __future__ import annotations

from functools import partial
from inspect import Parameter, signature
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from verl.nf4 import num_in_four_bits

_LAYER = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")


class Branch(NamedTuple):
    """What a layer adds to the residual: hidden, or projection(hidden) where there is one."""

    projection: nn.Linear | None
    hidden: Tensor


class PreNormLayer:
    """The forward of a layer: x = h + attention(norm(h)), x + mlp(norm(x)). Kernels replace its other methods.

    selects: whether it returns the positions `source` alone, [1, T, E] -> [1, A, E]
    """

    def __init__(self, module: Any, selects: bool = False) -> None:
        self.module, self.selects = module, selects

    def __call__(self, hidden_states: Tensor, *, source: Tensor | None = None, **options: Any) -> Tensor:
        normalized, residual = self.normalize(self.module.input_layernorm, hidden_states)
        projection, attended = self.attend(normalized, **options)
        if self.selects and source is not None:
            attended, residual = (each.squeeze(0)[source][None] for each in (attended, residual))
        total = self.add(Branch(projection, attended), residual)
        normalized, residual = self.normalize(self.module.post_attention_layernorm, total)
        return self.add(self.feed_forward(normalized), residual)

    def normalize(self, norm: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(hidden), hidden)"""
        return norm(hidden), hidden

    def attend(self, normalized: Tensor, **options: Any) -> Branch:
        return Branch(None, self.module.self_attn(hidden_states=normalized, **options)[0])

    def feed_forward(self, normalized: Tensor) -> Branch:
        return Branch(None, self.module.mlp(normalized))

    def add(self, branch: Branch, residual: Tensor) -> Tensor:
        return residual + branch.hidden


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
    return sum(num_in_four_bits(each.mlp) + sum(part.numel() for part in each.mlp.parameters()) for each in layers)


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
    kinds = {name: value for name, value in vars(module).items() if isinstance(value, str)}  # attention, or a state
    forward = type(module).forward
    needed = [name for name, each in signature(forward).parameters.items() if each.default is Parameter.empty]
    others = dict.fromkeys({"position_embeddings"}.intersection(needed))
    try:
        output = forward(SimpleNamespace(**kinds, **dict(zip(_LAYER, parts, strict=True))), hidden, **others)
    except (AttributeError, TypeError, ValueError):  # it has further parts, arguments or results
        return False
    middle = hidden + attention(before(hidden))
    return isinstance(output, Tensor) and torch.allclose(output, middle + mlp(after(middle)))
