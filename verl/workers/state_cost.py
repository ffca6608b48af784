"""What layers with state cost beside their matrices: products with their states, and what a sequence's states take.

A state is a matrix per head, to which every token adds a product of two vectors, and which is read once by another
vector (Mamba2). The delta rule (gated delta nets, KDA) reads it once more, to write the difference alone. Each of these
is a multiply-add per element of the state. The decay and the gates are neglected, as activations are. Kernels that
compute tokens in chunks do more work, which is not the model's.

The convolution is depthwise: its products are those of its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from verl.workers.state import has_state

_DELTA, _MAMBA2 = 3, 2  # multiply-adds per element of a state and token


class Parts(NamedTuple):
    """Which parts a decoder layer has."""

    attention: bool = True
    state: bool = False
    mlp: bool = True


@dataclass(frozen=True, slots=True)
class StateCost:
    """Of all layers of a decoder.

    parts: of each layer; products: multiply-adds with states per token
    elements: of the states and convolution tails of a sequence, as vLLM keeps them
    """

    parts: tuple[Parts, ...]
    products: int
    elements: int

    @property
    def attending(self) -> int:
        """Layers with attention."""
        return sum(each.attention for each in self.parts)


def state_cost(decoder: nn.Module) -> StateCost | None:
    """None for a decoder whose layers have no state."""
    layers = [[*layer.modules()] for layer in getattr(decoder, "layers", [])]
    mixers = [each for modules in layers for each in modules if has_state(each)]
    if not mixers:
        return None
    states = [_state(each) for each in mixers]
    tails = [
        each.in_channels * (each.kernel_size[0] - 1)
        for mixer in mixers
        for each in mixer.modules()
        if isinstance(each, nn.Conv1d)
    ]
    return StateCost(
        parts=tuple(map(_parts, layers)),
        products=sum(size * times for size, times in states),
        elements=sum(size for size, _ in states) + sum(tails),
    )


def _parts(modules: Sequence[nn.Module]) -> Parts:
    """By the names of transformers' classes."""
    names = [type(each).__name__ for each in modules if not has_state(each)]
    return Parts(
        attention=any(name.endswith("Attention") for name in names),
        state=len(names) < len(modules),
        mlp=any(name.endswith("MLP") for name in names),
    )


def _state(mixer: Any) -> tuple[int, int]:
    """(elements of the layer's recurrent state, multiply-adds per element and token), by transformers' names"""
    if hasattr(mixer, "head_k_dim"):
        return mixer.num_v_heads * mixer.head_k_dim * mixer.head_v_dim, _DELTA
    if hasattr(mixer, "ssm_state_size"):
        return mixer.num_heads * mixer.head_dim * mixer.ssm_state_size, _MAMBA2
    if hasattr(mixer, "qkv_dim"):  # KDA
        return mixer.num_heads * mixer.head_dim**2, _DELTA
    return 0, 0  # a convolution alone
