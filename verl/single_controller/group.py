"""What a group of workers is: the same object on every rank, called from one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class WorkerGroup(Protocol):
    """Runs functions whose first argument is the rank's worker object."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(worker, *args)` on every rank; the results in rank order."""

    def scatter(self, function: Callable[..., Any], shards: Sequence[Any], *args: Any) -> list[Any]:
        """`function(worker, shard, *args)` with one shard for each rank; the results in rank order."""
