"""The share of a GPU's memory that a vLLM engine gets if `rollout.gpu_memory_utilization` is not set."""

from __future__ import annotations

import math

CONTEXT_GIB = 2.0  # assumed, not measured: GPU memory of the CUDA context, NCCL and a sleeping engine
ALONE = 0.9  # of a GPU without a trainer rank; the rest is for CUDA graphs and fragmentation


def engine_share(held: float, total: float) -> float:
    """What a trainer rank leaves, in whole percent, at most ALONE; 0 or less if it leaves nothing.

    held: bytes of the rank on the same GPU while the engine is awake, with its CUDA context; total: the GPU's bytes
    """
    return min(ALONE, math.floor(100 * (total - held) / total) / 100)
