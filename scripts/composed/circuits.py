"""Initial weights that can copy, which a small transformer needs many steps to find (Olsson et al., arXiv 2209.11895).

layer 0     a head for each of the last tokens: RoPE turns constant queries and keys, the biases, into a fixed offset
layers 1+   induction heads: they attend to the tokens that follow an earlier occurrence of the current one, and copy
            them; same-token heads: they attend to earlier occurrences
The other heads and all MLPs keep random weights, but write less. Training changes everything.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

_OFFSETS = (1, 2, 3)  # of the heads of layer 0, in tokens
_WRITTEN = 0.08  # scale of what a head of layer 0 writes
_COPIED = 0.2  # likewise for a copying head
_SHARP = 12.0  # logit of a wanted token
_QUIET = 0.1  # scale of the random outputs
_SLOW = 0.03  # a frequency below this hardly turns within a prompt


@torch.no_grad()
def init_copying(model: Qwen2ForCausalLM, generator: torch.Generator) -> None:
    """Needs as many key-value heads as heads."""
    config = model.config
    heads, width = config.num_attention_heads, config.hidden_size
    size = width // heads
    frequencies = config.rope_parameters["rope_theta"] ** (-torch.arange(size // 2) / (size // 2))
    layers = model.model.layers
    for layer in layers:  # what is random must not drown what is not
        layer.mlp.down_proj.weight *= _QUIET
        layer.self_attn.o_proj.weight *= _QUIET
    first = layers[0].self_attn
    read, write = [], []
    for head, offset in enumerate(_OFFSETS):
        rows = slice(head * size, (head + 1) * size)
        _attend_at(first, rows, offset, frequencies)
        read.append(_orthonormal(size, width, generator))
        write.append(_orthonormal(size, width, generator))
        first.v_proj.weight[rows] = read[-1]
        first.o_proj.weight[:, rows] = _WRITTEN * write[-1].T
    slow = (frequencies < _SLOW).repeat(2)
    for layer in layers[1:]:
        attention = layer.self_attn
        for head in range(3):
            rows = slice(head * size, (head + 1) * size)
            mix = _orthonormal(size, size, generator)[: int(slow.sum())]
            seen, wanted = (read[0], write[0]) if head < 2 else (read[1], read[1])
            gain = (_SHARP * size**0.5 / (int(slow.sum()) * (1.0 if head == 2 else 0.5))) ** 0.5
            for projection, source in ((attention.q_proj, seen), (attention.k_proj, wanted)):
                projection.weight[rows] = 0.0
                projection.weight[rows][slow] = gain * (mix @ source)
                projection.bias[rows] = 0.0
            copied = _orthonormal(size, width, generator)
            attention.v_proj.weight[rows] = copied
            attention.o_proj.weight[:, rows] = _COPIED * copied.T


def _attend_at(attention: torch.nn.Module, rows: slice, offset: int, frequencies: Tensor) -> None:
    """Constant query and key whose product has its maximum at this distance."""
    strength = torch.where(frequencies > 0.02, 1.0, 0.0)
    scale = (4 * _SHARP * len(frequencies) ** 0.5 / strength.sum()) ** 0.5
    angle = -offset * frequencies
    attention.q_proj.weight[rows] *= 0.1
    attention.k_proj.weight[rows] *= 0.1
    attention.q_proj.bias[rows] = scale * torch.cat([strength * angle.cos(), strength * angle.sin()])
    attention.k_proj.bias[rows] = scale * torch.cat([strength, torch.zeros_like(strength)])


def _orthonormal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    square = torch.linalg.qr(torch.randn(columns, columns, generator=generator))[0]
    return square[:rows]
