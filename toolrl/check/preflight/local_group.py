"""One worker in this process: for tests and small runs."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any


class LocalGroup:
    finished_calls = 0  # the caller itself makes them

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    @property
    def size(self) -> int:
        return 1

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return [function(self._worker, *args)]

    def call_beside(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self.call(function, *args)

    def scatter(self, function: Callable[..., Any], shards: Iterable[Any], *args: Any) -> list[Any]:
        (shard,) = shards
        return [function(self._worker, shard, *args)]

    async def submit(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        assert rank == 0
        result = function(self._worker, *args)
        return await result if inspect.isawaitable(result) else result

    def close(self) -> None:
        """No-op."""
