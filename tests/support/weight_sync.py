"""A weight sync without a trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from verl.rollout.engine import SingleEngine, WeightTarget
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
    pool: WeightTarget | None = None,
) -> None:
    """All of `weights`, in many buckets unless another size is asked for. pool: of the engine alone, if it has one"""
    named, sender, target = list(weights), sender or SharedMemory(), pool or engine
    layouts = plan(named, dtype, bucket_bytes)
    await target.begin_weights(layouts)
    tensors = dict(named)
    for layout in layouts:
        flat = filled(layout, sender, tensors)
        handle: BucketHandle = sender.send(layout, flat)
        await engine.load_bucket(layout, handle)
    await target.end_weights(version)
