"""A weight sync without a trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from verl.rollout.engine import SingleEngine
from verl.transfer.bucket import BucketHandle, BucketLayout, BucketSender, plan
from verl.transfer.shared_memory import SharedMemory


def filled(layout: BucketLayout, sender: BucketSender, tensors: Mapping[str, Tensor]) -> Tensor:
    """The sender's buffer with a bucket of these tensors."""
    flat = sender.buffer(layout)
    for piece, view in layout.unpack(flat):
        view.copy_(tensors[piece.names[0]].detach())
    return flat


async def sync(
    engine: SingleEngine,
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
        flat = filled(layout, sender, tensors)
        handle: BucketHandle = sender.send(layout, flat)
        await engine.load_bucket(layout, handle)
    await engine.end_weights(version)
