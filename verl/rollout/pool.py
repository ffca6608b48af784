"""Several engines in other processes as one: each request goes to the engine with the least in flight.

Where rollouts go on while the policy learns, responses are being written when new weights come. `OnWeightSync` says
what
becomes of them; whichever it is, no engine ever changes its weights within a request, so the version of every token is
known.

An engine that is lost (its process died or stays stopped, or vLLM below it failed) is replaced: `make_lost` puts
another in its place, which requests go to once it has weights. What it was writing is asked for again, with the same
seed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from typing import TYPE_CHECKING, Any

from verl.errors import EngineError, EngineLostError, LostRequestError
from verl.rollout.engine import RolloutEngine, Sampling, each_of
from verl.rollout.stopping import Decode, tokens_to_stop
from verl.single_controller.group import WorkerGroup, WorkerLostError
from verl.transfer.bucket import BucketHandle, BucketLayout
from verl.transfer.gpu import Rendezvous
from verl.types import Completion, FinishReason

if TYPE_CHECKING:
    from verl.rollout.vllm_engine import VLLMEngine

_SEEDS_BETWEEN_PIECES = 1_000_033  # so that what goes on draws other numbers than what was broken off
_ASK_AGAIN_S = 0.2
_ATTEMPTS = 2  # to have a request answered
_MAX_REMAKES = 3  # of one engine, without new weights between

_log = logging.getLogger(__name__)


class OnWeightSync(StrEnum):
    """What responses do that are being written when new weights come."""

    CONTINUE = "continue"  # the new weights write on from where the old ones were
    FINISH = "finish"  # the old weights write them to their end first
    ABORT_AND_RETRY = "abort_and_retry"  # the new weights write them anew; earlier turns of an episode stay


class _ReplacedError(Exception):
    """The engine was lost; another takes its place."""


class EnginePool:
    """A RolloutEngine over a worker group whose workers are engines."""

    def __init__(
        self,
        workers: WorkerGroup,
        sources: Sequence[Sequence[int]],
        on_weight_sync: OnWeightSync | None = None,
        decode: Decode | None = None,
        remake: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        """sources: by engine, the places of those offers of a bucket that are meant for it
        on_weight_sync: None where nothing is ever being written then
        decode: the text of tokens; needed for stop strings of responses that go on with other weights
        remake: starts another engine in the place of a lost one; left out, a loss is an error
        """
        self._workers = workers
        self._sources = sources
        self._on_publish = on_weight_sync
        self._decode = decode
        self._remake = remake
        self._in_flight = [0] * workers.size
        self._open = asyncio.Event()  # cleared while weights are replaced
        self._open.set()
        self._held = False  # whether it stays so when they are there
        self._landed = asyncio.Event()  # something has; for those who wait until all has
        self.version: int | None = None  # of the weights that were published last
        self.restore: Callable[[], Awaitable[None]] | None = None  # calls `make_lost` and publishes, when it may
        self.num_remade = self.num_retried = 0  # engines, requests; whoever reports them sets them back
        self._ready = set(range(workers.size))  # engines that requests go to
        self._usable = asyncio.Event()  # there is one, or there will be none
        self._usable.set()
        self._given: set[int] = set()  # those that have all of the new weights
        self._lost: dict[int, Exception] = {}  # what each was lost by
        self._losses = [0] * workers.size
        self._in_a_row = [0] * workers.size  # how often each was remade since there were new weights
        self._restoring: asyncio.Task[None] | None = None
        self._failure: Exception | None = None  # why what is lost is not replaced

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
        if self._on_publish is None:
            return await self._ask(prompt_ids, sampling)
        return tuple(await asyncio.gather(*(self._whole(prompt_ids, one) for one in each_of(sampling))))

    async def _whole(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """One completion, in as many pieces as publications break it into."""
        pieces: list[Completion] = []
        while True:
            written = tuple(chain.from_iterable(piece.token_ids for piece in pieces))
            (piece,) = await self._ask((*prompt_ids, *written), _rest(sampling, pieces))
            if written:
                piece = self._stopped(written, piece, sampling.stop_strings)
            interrupted = piece.finish_reason is FinishReason.ABORT and not self._open.is_set()
            if not interrupted:
                return joined([*pieces, piece])
            if self._on_publish is OnWeightSync.CONTINUE and piece.token_ids:
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
        for _ in range(_ATTEMPTS):
            rank = await self._choose()
            self._in_flight[rank] += sampling.n
            try:
                completions: tuple[Completion, ...] = await self._submit(rank, _generate, prompt_ids, sampling)
                return completions
            except _ReplacedError as error:
                cause = error.__cause__
                self.num_retried += 1
            finally:
                self._in_flight[rank] -= sampling.n
                self._landed.set()
        raise LostRequestError(f"the engine was lost {_ATTEMPTS} times in a row; the last time: {cause}")

    async def _choose(self) -> int:
        """The engine with the least in flight, once there is one. Raises what keeps lost ones from being replaced."""
        while self._failure is None and not (self._open.is_set() and self._ready):
            await self._open.wait()
            await self._usable.wait()
        if self._failure is not None:
            raise self._failure
        return min(sorted(self._ready), key=self._in_flight.__getitem__)

    async def _submit(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """What an engine answers. Raises _ReplacedError where it is lost and another is to take its place."""
        losses = self._losses[rank]
        try:
            return await self._workers.submit(rank, function, *args)
        except (WorkerLostError, EngineLostError) as error:
            if self._remake is None:
                raise
            if self._losses[rank] == losses:  # nobody has noticed before
                self._lose(rank, error)
            raise _ReplacedError from error

    def _lose(self, rank: int, cause: Exception) -> None:
        first, *others = str(cause).splitlines() or [repr(cause)]
        last = f" ({others[-1].strip()})" if others else ""  # of a log, whose middle helps nobody on a console
        _log.warning("%s%s\nAnother engine takes its place, and is asked again what this one was asked", first, last)
        self._losses[rank] += 1
        self._lost[rank] = cause
        self._ready.discard(rank)
        if not self._ready:
            self._usable.clear()
        if self.restore is not None and (self._restoring is None or self._restoring.done()):
            self._restoring = asyncio.create_task(self._restore(self.restore))

    async def _restore(self, restore: Callable[[], Awaitable[None]]) -> None:
        try:
            while self._lost:
                await restore()
        except Exception as error:  # noqa: BLE001  it is raised to all who ask for anything from now on
            self._failure = error
            self._usable.set()

    @property
    def lost(self) -> Sequence[int]:
        """Ranks of the engines that are lost and not yet replaced."""
        return sorted(self._lost)

    async def make_lost(self) -> Sequence[int]:
        """Put others in the places of lost engines; their ranks. Requests go to them once they were published to.

        Raises EngineError if one keeps being lost.
        """
        ranks = self.lost
        await asyncio.gather(*(self._make(rank) for rank in ranks))
        return ranks

    async def _make(self, rank: int) -> None:
        assert self._remake is not None
        while rank in self._lost:
            cause = self._lost[rank]
            if self._in_a_row[rank] == _MAX_REMAKES:
                raise EngineError(
                    f"an engine was lost {_MAX_REMAKES + 1} times without a step between; the last time: {cause}"
                ) from cause
            self._in_a_row[rank] += 1
            self.num_remade += 1
            try:
                await self._remake(rank)
            except (WorkerLostError, EngineLostError) as error:
                self._lost[rank] = error
            else:
                del self._lost[rank]

    def only(self, ranks: Sequence[int]) -> EngineSubset:
        """Some of the engines, to publish to while the others go on."""
        return EngineSubset(self, ranks)

    @property
    def _all(self) -> EngineSubset:
        return self.only(range(self._workers.size))

    async def interrupt(self) -> None:
        await self._on(range(self._workers.size), _interrupt)

    async def begin_weights(self, layouts: Sequence[BucketLayout]) -> None:
        """Once nothing is being written any more; what wants to be waits until all weights are there."""
        self._open.clear()
        try:
            await self._wait_until_quiet()
            await self._all.begin_weights(layouts)
        except BaseException:
            self._open.set()  # with the old weights, or to hear that there are none
            raise

    async def _wait_until_quiet(self) -> None:
        while any(self._in_flight):
            self._landed.clear()
            if self._on_publish is not OnWeightSync.FINISH:
                await self.interrupt()  # again, as long as a request may have been on its way to an engine
            with suppress(TimeoutError):
                await asyncio.wait_for(self._landed.wait(), _ASK_AGAIN_S)

    async def load_bucket(self, layout: BucketLayout, *offers: BucketHandle) -> None:
        """Offers may be references to them (`WorkerGroup.refer`), so that they travel straight to the engines."""
        await self._all.load_bucket(layout, *offers)

    async def end_weights(self, version: int) -> None:
        await self._all.end_weights(version)

    def _admit(self) -> None:
        """Let requests go to all engines that have the new weights."""
        self._ready |= self._given - self._lost.keys()
        self._given.clear()
        self._open.set()
        if self._ready:
            self._usable.set()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A publication inside lets nobody write before the end of the block but `generate_everywhere`, which would
        else have to wait behind all that waits for the weights."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
            self._admit()

    async def sleep(self) -> None:
        await self._on(range(self._workers.size), _sleep)

    async def close(self) -> None:
        await self._on(range(self._workers.size), close_engine)

    async def generate_everywhere(self, prompt_ids: Sequence[int], sampling: Sampling) -> list[tuple[Completion, ...]]:
        """The same request to every engine that is not lost, in the order of their ranks."""
        return await self._all.generate_everywhere(prompt_ids, sampling)

    async def _on(self, ranks: Iterable[int], function: Callable[..., Awaitable[Any]], *args: Any) -> list[Any]:
        """What those of the engines answer that are not lost."""
        return await self._each(dict.fromkeys(ranks, args), function)

    async def _each(self, asked: dict[int, tuple[Any, ...]], function: Callable[..., Awaitable[Any]]) -> list[Any]:
        """As `_on`, with arguments for each."""

        async def answer(rank: int, args: tuple[Any, ...]) -> list[Any]:
            try:
                return [await self._submit(rank, function, *args)]
            except _ReplacedError:
                return []

        answers = await asyncio.gather(*(answer(rank, args) for rank, args in asked.items() if rank not in self._lost))
        return list(chain.from_iterable(answers))


@dataclass(frozen=True)
class EngineSubset:
    """Some engines of a pool as those who publish see them. One that is lost meanwhile is left out from then on."""

    pool: EnginePool
    ranks: Sequence[int]

    async def begin_weights(self, layouts: Sequence[BucketLayout]) -> None:
        await self.pool._on(self.ranks, _begin_weights, layouts)

    async def load_bucket(self, layout: BucketLayout, *offers: BucketHandle) -> None:
        sources = self.pool._sources
        asked = {rank: (layout, *(offers[place] for place in sources[rank])) for rank in self.ranks}
        await self.pool._each(asked, _load_bucket)

    async def end_weights(self, version: int) -> None:
        pool = self.pool
        await pool._on(self.ranks, _end_weights, version)
        if version != pool.version:
            pool._in_a_row = [0] * len(pool._in_a_row)
        pool.version = version
        pool._given |= set(self.ranks) - pool._lost.keys()
        if not pool._held:
            pool._admit()

    async def generate_everywhere(self, prompt_ids: Sequence[int], sampling: Sampling) -> list[tuple[Completion, ...]]:
        return await self.pool._on(self.ranks, _generate, prompt_ids, sampling)


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


def _begin_weights(engine: RolloutEngine, layouts: Sequence[BucketLayout]) -> Awaitable[None]:
    return engine.begin_weights(layouts)


def _load_bucket(engine: RolloutEngine, layout: BucketLayout, *offers: BucketHandle) -> Awaitable[None]:
    return engine.load_bucket(layout, *offers)


def _end_weights(engine: RolloutEngine, version: int) -> Awaitable[None]:
    return engine.end_weights(version)


def _sleep(engine: RolloutEngine) -> Awaitable[None]:
    return engine.sleep()


def close_engine(engine: RolloutEngine) -> Awaitable[None]:
    """To be submitted to an engine's worker."""
    return engine.close()


def join_broadcast(engine: VLLMEngine, meeting: Rendezvous, first: int) -> Awaitable[None]:
    """To be submitted to the worker of an engine on GPUs of its own, while the trainer waits for it."""
    return engine.join_broadcast(meeting, first)
