"""Several engines in other processes as one: each request goes to the engine with the least in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from verl.rollout.engine import RolloutEngine, Sampling
from verl.single_controller.group import WorkerGroup
from verl.transfer.bucket import Layout, Offer
from verl.transfer.gpu import Meeting
from verl.types import Completion

if TYPE_CHECKING:
    from verl.rollout.vllm_engine import VLLMEngine


class EnginePool:
    """A RolloutEngine over a worker group whose workers are engines."""

    def __init__(self, workers: WorkerGroup, sources: Sequence[Sequence[int]]) -> None:
        """sources: by engine, the places of those offers of a bucket that are meant for it"""
        self._workers = workers
        self._sources = sources
        self._in_flight = [0] * workers.size

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
        rank = self._in_flight.index(min(self._in_flight))
        self._in_flight[rank] += sampling.n
        try:
            completions: tuple[Completion, ...] = await self._workers.submit(rank, _generate, prompt_ids, sampling)
        finally:
            self._in_flight[rank] -= sampling.n
        return completions

    async def begin_weights(self, layouts: Sequence[Layout]) -> None:
        await self._everywhere(_begin_weights, layouts)

    async def load_bucket(self, layout: Layout, *offers: Offer) -> None:
        """Offers may be references to them (`WorkerGroup.refer`), so that they travel straight to the engines."""
        await asyncio.gather(
            *(
                self._workers.submit(rank, _load_bucket, layout, *(offers[place] for place in places))
                for rank, places in enumerate(self._sources)
            )
        )

    async def end_weights(self, version: int) -> None:
        await self._everywhere(_end_weights, version)

    async def sleep(self) -> None:
        await self._everywhere(_sleep)

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


def _begin_weights(engine: RolloutEngine, layouts: Sequence[Layout]) -> Awaitable[None]:
    return engine.begin_weights(layouts)


def _load_bucket(engine: RolloutEngine, layout: Layout, *offers: Offer) -> Awaitable[None]:
    return engine.load_bucket(layout, *offers)


def _end_weights(engine: RolloutEngine, version: int) -> Awaitable[None]:
    return engine.end_weights(version)


def _sleep(engine: RolloutEngine) -> Awaitable[None]:
    return engine.sleep()


def close_engine(engine: RolloutEngine) -> Awaitable[None]:
    """To be submitted to an engine's worker."""
    return engine.close()


def join_broadcast(engine: VLLMEngine, meeting: Meeting, first: int) -> Awaitable[None]:
    """To be submitted to the worker of an engine on GPUs of its own, while the trainer waits for it."""
    return engine.join_broadcast(meeting, first)
