"""The interface of a worker group: the same object on every rank, called by the controller."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from verl.errors import VerlError


class WorkerError(VerlError, RuntimeError):
    """A worker died, raised, or timed out; the message names the worker and its task."""


class WorkerLostError(WorkerError):
    """Its process is gone, or its object unusable: only a replacement can serve further calls."""


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """A worker's rank in its group, and the group's rendezvous address."""

    rank: int
    size: int
    host: str = "127.0.0.1"  # rank 0's
    port: int = 0  # a free port of rank 0's machine
    devices: tuple[str, ...] = ()  # accelerators that this worker may use
    own_host: str = "127.0.0.1"  # where other workers reach this one


class WorkerGroup(Protocol):
    """Runs functions whose first argument is the rank's worker object."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def finished_calls(self) -> int:
        """Counts `call` and `scatter`: a sign of progress."""

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(worker, *args)` on every rank; the results in rank order."""

    def call_beside(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """As `call`, on a thread of its own on every rank: it runs beside other calls, even one that never ends."""

    def scatter(self, function: Callable[..., Any], shards: Iterable[Any], *args: Any) -> list[Any]:
        """`function(worker, shard, *args)`, a shard for each rank; the results in rank order."""

    def submit(self, rank: int, function: Callable[..., Any], *args: Any) -> Awaitable[Any]:
        """`function(worker, *args)` on one rank; coroutine functions run concurrently."""

    def close(self) -> None:
        """Stop the workers."""


class ReplaceableGroup(WorkerGroup, Protocol):
    """A group whose lost workers can be replaced."""

    async def remake(self, rank: int) -> None:
        """Replace a lost worker; its state and pending calls are lost. Raises WorkerError if that fails."""


@dataclass(frozen=True)
class WorkerView:
    """A group viewed through one attribute of its workers: components share processes."""

    group: WorkerGroup
    name: str

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def finished_calls(self) -> int:
        return self.group.finished_calls

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self.group.call(_Member(self.name, function), *args)

    def call_beside(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self.group.call_beside(_Member(self.name, function), *args)

    def scatter(self, function: Callable[..., Any], shards: Iterable[Any], *args: Any) -> list[Any]:
        return self.group.scatter(_Member(self.name, function), shards, *args)

    def submit(self, rank: int, function: Callable[..., Any], *args: Any) -> Awaitable[Any]:
        return self.group.submit(rank, _Member(self.name, function), *args)

    def close(self) -> None:
        self.group.close()


@dataclass(frozen=True, slots=True)
class Method:
    """A function for `WorkerGroup` that calls a method of the worker."""

    name: str

    def __call__(self, worker: Any, *args: Any) -> Any:
        return getattr(worker, self.name)(*args)


@dataclass(frozen=True, slots=True)
class _Member:
    """A function for `WorkerGroup` that calls another with an attribute of the worker."""

    name: str
    function: Callable[..., Any]

    def __call__(self, worker: Any, *args: Any) -> Any:
        return self.function(getattr(worker, self.name), *args)


def task_name(function: Callable[..., Any]) -> str:
    """The name of a call in messages."""
    if isinstance(function, _Member):
        function = function.function
    return function.name if isinstance(function, Method) else str(function.__qualname__)
