"""A colocated vLLM engine's share of its GPU, and its limits of a forward pass, where they are not set."""

from __future__ import annotations

import math

# GPU memory beside torch's, assumed, not measured. A run measures its ranks' before it starts its engines.
RANK_CONTEXT_GIB = 1.0  # per trainer rank: the CUDA context and NCCL
ENGINE_CONTEXT_GIB = 1.0  # per engine, beside its share: its own context; asleep, what it does not release
CONTEXT_GIB = RANK_CONTEXT_GIB + ENGINE_CONTEXT_GIB
ALONE = 0.9  # share of a GPU without a trainer rank; the rest is for CUDA graphs and fragmentation


def engine_share(held: float, total: float) -> float:
    """What a trainer rank leaves, in whole percent, at most ALONE; 0 or less if it leaves nothing.

    held: bytes of the rank on the same GPU while the engine is awake, with both CUDA contexts; total: the GPU's bytes
    """
    return min(ALONE, math.floor(100 * (total - held) / total) / 100)


# Tokens per forward pass, with as many sequences: half as many passes of prefill as by vLLM's default, each of which is
# assumed to take 5 ms beside its work. vLLM takes their activations from the KV cache.
MANY_TOKENS = 32768
MANY_SEQUENCES = 2048  # vLLM's sampler holds several float32 copies of their logits: at 152,000 tokens 1.2 GB each
_CACHE = 0.9  # assumed, of what weights leave: the rest is for activations and the sampler


def many_fit(room: float, longest: float) -> bool:
    """Whether the KV cache holds MANY_SEQUENCES even at maximum length.

    The more sequences are decoded at once, the fewer times weights are read. An overfull cache would interrupt them.

    room: bytes that weights leave of the engine's share; longest: bytes of a sequence of maximum length in the cache
    """
    return _CACHE * room >= MANY_SEQUENCES * longest
