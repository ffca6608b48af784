"""A weight sync without a trainer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from verl.rollout.engine import RolloutEngine
from verl.transfer.bucket import BucketHandle, BucketSender, plan
from verl.transfer.shared_memory import SharedMemory


async def sync(
    engine: RolloutEngine,
    version: int,
    weights: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype = torch.float32,
    bucket_bytes: int = 2**14,
    sender: BucketSender | None = None,
) -> None:
    """All of `weights`, in many buckets unless another size is asked for."""
    named, sender = list(weights), sender or SharedMemory()
    layouts = plan(named, dtype, bucket_bytes)
    await engine.begin_weights(layouts)
    tensors = dict(named)
    for layout in layouts:
        flat = sender.buffer(layout)
        for piece, view in layout.unpack(flat):
            view.copy_(tensors[piece.names[0]].detach())
        handle: BucketHandle = sender.send(layout, flat)
        await engine.load_bucket(layout, handle)
    await engine.end_weights(version)
