"""Several engines in other processes as one: each request goes to the engine with the least in flight.

Where rollouts go on while the policy learns, replies are being written when new weights come. `OnPublish` says what
becomes of them; whichever it is, no engine ever changes its weights within a request, so the version of every token is
known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from enum import StrEnum
from itertools import chain
from typing import TYPE_CHECKING, Any

from verl.rollout.engine import RolloutEngine, Sampling, each_of
from verl.rollout.stopping import Decode, tokens_to_stop
from verl.single_controller.group import WorkerGroup
from verl.transfer.bucket import Layout, Offer
from verl.transfer.gpu import Meeting
from verl.types import Completion, FinishReason

if TYPE_CHECKING:
    from verl.rollout.vllm_engine import VLLMEngine

_SEEDS_BETWEEN_PIECES = 1_000_033  # so that what goes on draws other numbers than what was broken off
_ASK_AGAIN_S = 0.2


class OnPublish(StrEnum):
    """What replies do that are being written when new weights come."""

    CONTINUE = "continue"  # the new weights write on from where the old ones were
    FINISH = "finish"  # the old weights write them to their end first
    ABORT_AND_RETRY = "abort_and_retry"  # the new weights write them anew; earlier turns of an episode stay


class EnginePool:
    """A RolloutEngine over a worker group whose workers are engines."""

    def __init__(
        self,
        workers: WorkerGroup,
        sources: Sequence[Sequence[int]],
        on_publish: OnPublish | None = None,
        decode: Decode | None = None,
    ) -> None:
        """sources: by engine, the places of those offers of a bucket that are meant for it
        on_publish: None where nothing is ever being written then
        decode: the text of tokens; needed for stop strings of replies that go on with other weights"""
        self._workers = workers
        self._sources = sources
        self._on_publish = on_publish
        self._decode = decode
        self._in_flight = [0] * workers.size
        self._open = asyncio.Event()  # cleared while weights are replaced
        self._open.set()
        self._held = False  # whether it stays so when they are there
        self._landed = asyncio.Event()  # something has; for those who wait until all has

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
        if self._on_publish is None:
            return await self._ask(prompt_ids, sampling)
        return tuple(await asyncio.gather(*(self._whole(prompt_ids, one) for one in each_of(sampling))))

    async def _whole(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """One completion, in as many pieces as publications break it into."""
        pieces: list[Completion] = []
        while True:
            await self._open.wait()
            written = tuple(chain.from_iterable(piece.token_ids for piece in pieces))
            (piece,) = await self._ask((*prompt_ids, *written), _rest(sampling, pieces))
            if written:
                piece = self._stopped(written, piece, sampling.stop_strings)
            interrupted = piece.finish_reason is FinishReason.ABORT and not self._open.is_set()
            if not interrupted:
                return joined([*pieces, piece])
            if self._on_publish is OnPublish.CONTINUE and piece.token_ids:
                pieces.append(piece)

    def _stopped(self, written: Sequence[int], piece: Completion, stops: Sequence[str]) -> Completion:
        """Ended where a stop string ends that was begun before: an engine looks for it in what it writes itself."""
        if not stops:
            return piece
        assert self._decode is not None, "stop strings of replies in pieces are looked for in their text"
        end = tokens_to_stop(self._decode, written, piece.token_ids, stops)
        if end is None:
            return piece
        return replace(
            piece, token_ids=piece.token_ids[:end], logprobs=piece.logprobs[:end], finish_reason=FinishReason.STOP
        )

    async def _ask(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
        rank = self._in_flight.index(min(self._in_flight))
        self._in_flight[rank] += sampling.n
        try:
            completions: tuple[Completion, ...] = await self._workers.submit(rank, _generate, prompt_ids, sampling)
        finally:
            self._in_flight[rank] -= sampling.n
            self._landed.set()
        return completions

    async def interrupt(self) -> None:
        await self._everywhere(_interrupt)

    async def begin_weights(self, layouts: Sequence[Layout]) -> None:
        """Once nothing is being written any more; what wants to be waits until all weights are there."""
        self._open.clear()
        try:
            await self._wait_until_quiet()
            await self._everywhere(_begin_weights, layouts)
        except BaseException:
            self._open.set()  # with the old weights, or to hear that there are none
            raise

    async def _wait_until_quiet(self) -> None:
        while any(self._in_flight):
            self._landed.clear()
            if self._on_publish is not OnPublish.FINISH:
                await self.interrupt()  # again, as long as a request may have been on its way to an engine
            with suppress(TimeoutError):
                await asyncio.wait_for(self._landed.wait(), _ASK_AGAIN_S)

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
        if not self._held:
            self._open.set()

    @contextmanager
    def held(self) -> Iterator[None]:
        """A publication inside lets nobody write before the end of the block but `generate_everywhere`, which would
        else have to wait behind all that waits for the weights."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
            self._open.set()

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


def _rest(sampling: Sampling, pieces: Sequence[Completion]) -> Sampling:
    """What is left to ask for."""
    if not pieces:
        return sampling
    seed = None if sampling.seed is None else sampling.seed + len(pieces) * _SEEDS_BETWEEN_PIECES
    num_written = sum(len(piece.token_ids) for piece in pieces)
    return replace(sampling, max_tokens=sampling.max_tokens - num_written, seed=seed)


def joined(pieces: Sequence[Completion]) -> Completion:
    """Pieces that follow one another, as one completion."""
    *_, last = pieces
    if len(pieces) == 1:
        return last
    return Completion(
        tuple(chain.from_iterable(piece.token_ids for piece in pieces)),
        tuple(chain.from_iterable(piece.logprobs for piece in pieces)),
        last.finish_reason,
        last.weight_version,
        tuple(chain.from_iterable(piece.versions for piece in pieces)),
    )


def _interrupt(engine: RolloutEngine) -> Awaitable[None]:
    return engine.interrupt()


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
