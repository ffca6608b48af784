"""Frozen linear layers in four bits: NF4 (https://arxiv.org/abs/2305.14314), by bitsandbytes.

A model whose linear layers are rounded to NF4 is a model of its own, with weights that bfloat16 holds exactly. Engines
load it from a folder in 16 bits (`WeightFiles.write_rounded`). A training rank loads the same folder, keeps four bits
of each weight and a scale per block, and computes the folder's weights from them when it needs them. Nothing is lost
when a rounded weight is rounded again: the largest magnitude of a block is its scale, and all are multiples of that.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from verl.errors import ConfigError

logging.getLogger("bitsandbytes.backends.cpu").setLevel(logging.ERROR)  # it misses a kernel that is not used here
NF4 = "nf4"
_BLOCK = 64  # weights that share a scale
BYTES = 0.5 + 4 / _BLOCK  # per weight, with its share of a float32 scale


class Nf4Linear(nn.Linear):
    """A linear layer without `weight`. Every rank holds all of it: buffers are not sharded."""

    packed: Tensor  # [out * in / 2, 1] uint8, two weights each
    scales: Tensor  # [blocks] float32
    dtype = torch.bfloat16  # of the weight

    def forward(self, hidden: Tensor) -> Tensor:
        apply: Any = _Linear.apply
        output: Tensor = apply(hidden, self)
        return output

    @property
    def shape(self) -> torch.Size:
        """Of the weight. With `detach` the layer stands for it where weights are exported one by one."""
        return torch.Size((self.out_features, self.in_features))

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales.nbytes

    def detach(self) -> Tensor:
        """The weight in bfloat16, computed anew."""
        return _weight(self.packed, self.scales).view(self.shape)

    def empty_weight(self) -> Tensor:
        """In which a weight is read, to be rounded."""
        return torch.empty(self.shape, dtype=torch.bfloat16, device=self.packed.device)

    def round_weight(self, weight: Tensor) -> None:
        """Hold this weight, in bfloat16, from now on."""
        packed, scales = _quantized(weight)
        self.packed.copy_(packed)
        self.scales.copy_(scales)


class _Linear(torch.autograd.Function):
    """The backward computes the weight again: kept for it, all of them together would be the model in 16 bits."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, layer: Nf4Linear) -> Tensor:
        ctx.layer = layer
        return functional.linear(hidden, layer.detach().to(hidden.dtype), layer.bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.layer.detach().to(gradient.dtype), None


def rounded(weight: Tensor) -> Tensor:
    """The weight in bfloat16 of a layer that holds this one. Raises ConfigError for an odd number of values."""
    if weight.numel() % 2:
        raise ConfigError(f"lora.base_dtype=nf4 packs two values in a byte; a weight has shape {tuple(weight.shape)}")
    return _weight(*_quantized(weight.bfloat16())).view(weight.shape)


def _quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(packed, scales)"""
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(weight, blocksize=_BLOCK, quant_type=NF4)
    return packed, state.absmax


def _weight(packed: Tensor, scales: Tensor) -> Tensor:
    """As one row: bitsandbytes 0.50 on a CPU takes wrong scales where the width of rows is no multiple of the block."""
    from bitsandbytes.functional import QuantState, dequantize_4bit

    make: Any = QuantState  # it has no types
    state = make(scales, torch.Size((1, 2 * len(packed))), None, _BLOCK, NF4, torch.bfloat16)
    weight: Tensor = dequantize_4bit(packed, state)
    return weight


def hold_in_four_bits(layer: nn.Linear) -> None:
    """Change a layer, on the meta device, so that it will hold its weight in four bits.

    In place, so that what holds the layer, such as an adapter's, does not notice.
    """
    number = layer.weight.numel()
    del layer.weight
    layer.__class__ = Nf4Linear
    packed = torch.empty(number // 2, 1, dtype=torch.uint8, device="meta")
    layer.register_buffer("packed", packed, persistent=False)
    layer.register_buffer("scales", torch.empty(-(-number // _BLOCK), device="meta"), persistent=False)


def nf4_layers(module: nn.Module) -> Iterator[tuple[str, Nf4Linear]]:
    """(name of the weight, layer) of what the module holds in four bits."""
    for name, each in module.named_modules():
        if isinstance(each, Nf4Linear):
            yield f"{name}.weight", each


def num_in_four_bits(module: nn.Module) -> int:
    """The module's weights that are no parameters, because they are held in four bits."""
    return sum(each.shape.numel() for _, each in nf4_layers(module))
