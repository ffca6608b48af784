"""Attention over packs: one function, registered with transformers' attention interface.

A segment attends to itself causally and to all of its prefix segment. On CPU this is one scaled-dot-product call per
segment. Shape legend: H query heads, K key heads, T packed tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from verl.batch import Segment

PACKED = "verl_packed"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    segments: Sequence[Segment],
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within segments and their prefixes.

    query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D]. Masks are not used: the segments say it all.
    """
    assert attention_mask is None, "packs carry no mask"
    outputs = []
    for segment in segments:
        own = slice(segment.start, segment.end)
        keys, values = key[:, :, own], value[:, :, own]
        bias = None
        if segment.prefix is not None:
            before = segments[segment.prefix]
            shared = slice(before.start, before.end)
            keys = torch.cat([key[:, :, shared], keys], dim=2)
            values = torch.cat([value[:, :, shared], values], dim=2)
            bias = causal_lower_right(own.stop - own.start, keys.shape[2])
        outputs.append(
            scaled_dot_product_attention(
                query[:, :, own],
                keys,
                values,
                attn_mask=bias,
                is_causal=bias is None,
                scale=scaling,
                enable_gqa=True,
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def register() -> None:
    """Make the function known to transformers under PACKED; harmless to repeat."""
    AttentionInterface.register(PACKED, packed_attention)
