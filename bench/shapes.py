"""Shapes of the models that benchmarks and tests build, with random weights or none."""

from __future__ import annotations

from typing import Any

from transformers import Qwen2Config

QWEN2_5 = {  # hidden, intermediate, layers, heads, key heads, vocabulary, tied head
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "3B": (2048, 11008, 36, 16, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
    "14B": (5120, 13824, 48, 40, 8, 152064, False),
    "32B": (5120, 27648, 64, 40, 8, 152064, False),
}


def qwen2(
    hidden: int, intermediate: int, layers: int, heads: int, key_heads: int, vocab: int, tied: bool = True, **more: Any
) -> Qwen2Config:
    """more: further fields of the configuration"""
    return Qwen2Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        **more,
    )
