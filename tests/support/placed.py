"""Stand-ins of ranks and engines that know their devices alone.

Every one has a process of its own, which imports this module: it needs nothing heavy.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl.single_controller.group import WorkerContext

Devices = tuple[str, ...]


@dataclass(frozen=True)
class Seen:
    """A worker that only knows its devices."""

    devices: Devices

    async def close(self) -> None:
        """As an engine."""


def visible() -> Devices:
    return tuple(os.environ["CUDA_VISIBLE_DEVICES"].split(","))


def fake_rank(spec: object, context: WorkerContext) -> Seen:
    return Seen(visible())


async def fake_engine(config: object, device: str, context: WorkerContext, share: float | None, compiled: bool) -> Seen:
    return Seen(context.devices or visible())


def devices(seen: Seen) -> Devices:
    return seen.devices
