"""What a group of workers is: the same object on every rank, called from one place."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from verl.errors import VerlError


class WorkerError(VerlError, RuntimeError):
    """A worker died, raised, or did not answer in time; says which one, and what it was doing."""


class WorkerLostError(WorkerError):
    """The worker's process is gone, or what it holds works no more: only another in its place can be asked again."""


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """A worker's place among its group, and where the group meets."""

    rank: int
    size: int
    host: str = "127.0.0.1"  # of rank 0
    port: int = 0  # free on rank 0's machine
    devices: tuple[str, ...] = ()  # accelerators that this worker may use


class WorkerGroup(Protocol):
    """Runs functions whose first argument is the rank's worker object.

    `call_ref` leaves results where they are and gives references to them, which the other verbs accept as arguments:
    what is large travels once, from worker to worker.
    """

    @property
    def size(self) -> int:
        """Number of ranks."""

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(worker, *args)` on every rank; the results in rank order."""

    def scatter(self, function: Callable[..., Any], shards: Sequence[Any], *args: Any) -> list[Any]:
        """`function(worker, shard, *args)` with one shard for each rank; the results in rank order."""

    def call_ref(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """As `call`, but references to the results, once all are there."""

    def submit(self, rank: int, function: Callable[..., Any], *args: Any) -> Awaitable[Any]:
        """`function(worker, *args)` on one rank, awaited while others run; coroutine functions run side by side."""

    def close(self) -> None:
        """End the workers."""


@dataclass(frozen=True)
class WorkerView:
    """A group seen through one attribute of its workers: one set of processes, several things that live in it."""

    group: WorkerGroup
    name: str

    @property
    def size(self) -> int:
        return self.group.size

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self.group.call(_on_member, self.name, function, *args)

    def scatter(self, function: Callable[..., Any], shards: Sequence[Any], *args: Any) -> list[Any]:
        return self.group.scatter(_on_member_shard, shards, self.name, function, *args)

    def call_ref(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self.group.call_ref(_on_member, self.name, function, *args)

    def submit(self, rank: int, function: Callable[..., Any], *args: Any) -> Awaitable[Any]:
        return self.group.submit(rank, _on_member, self.name, function, *args)

    def close(self) -> None:
        self.group.close()


def _on_member(worker: Any, name: str, function: Callable[..., Any], *args: Any) -> Any:
    return function(getattr(worker, name), *args)


def _on_member_shard(worker: Any, shard: Any, name: str, function: Callable[..., Any], *args: Any) -> Any:
    return function(getattr(worker, name), shard, *args)


def task_name(function: Callable[..., Any], args: Sequence[Any]) -> str:
    """What a call is called in messages."""
    if function in (_on_member, _on_member_shard):
        function = next(each for each in args if callable(each))
    return str(function.__qualname__)
