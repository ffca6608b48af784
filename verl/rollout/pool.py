"""Several engines in other processes as one: each request goes to the engine with the least in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from verl.rollout.engine import RolloutEngine, Sampling
from verl.single_controller.group import WorkerGroup
from verl.types import Completion

if TYPE_CHECKING:
    from torch import Tensor


class EnginePool:
    """A RolloutEngine over a worker group whose workers are engines."""

    def __init__(self, workers: WorkerGroup) -> None:
        self._workers = workers
        self._in_flight = [0] * workers.size

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
        rank = self._in_flight.index(min(self._in_flight))
        self._in_flight[rank] += sampling.n
        try:
            completions: tuple[Completion, ...] = await self._workers.submit(rank, _generate, prompt_ids, sampling)
        finally:
            self._in_flight[rank] -= sampling.n
        return completions

    async def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """`weights` may be a reference to them (`WorkerGroup.refer`), so that they travel straight to the engines."""
        await self._everywhere(_load_weights, version, weights)

    async def sleep(self) -> None:
        await self._everywhere(_sleep)

    async def wake(self) -> None:
        await self._everywhere(_wake)

    async def close(self) -> None:
        await self._everywhere(close_engine)

    async def generate_everywhere(self, prompt_ids: Sequence[int], sampling: Sampling) -> list[tuple[Completion, ...]]:
        """The same request to every engine, in the order of their ranks."""
        answers: list[tuple[Completion, ...]] = await asyncio.gather(
            *(self._workers.submit(rank, _generate, prompt_ids, sampling) for rank in range(self._workers.size))
        )
        return answers

    async def _everywhere(self, function: Callable[..., Awaitable[None]], *args: Any) -> None:
        await asyncio.gather(*(self._workers.submit(rank, function, *args) for rank in range(self._workers.size)))


def _generate(
    engine: RolloutEngine, prompt_ids: Sequence[int], sampling: Sampling
) -> Awaitable[tuple[Completion, ...]]:
    return engine.generate(prompt_ids, sampling)


def _load_weights(engine: RolloutEngine, version: int, weights: Iterable[tuple[str, Tensor]]) -> Awaitable[None]:
    return engine.load_weights(version, weights)


def _sleep(engine: RolloutEngine) -> Awaitable[None]:
    return engine.sleep()


def _wake(engine: RolloutEngine) -> Awaitable[None]:
    return engine.wake()


def close_engine(engine: RolloutEngine) -> Awaitable[None]:
    """To be submitted to an engine's worker."""
    return engine.close()
