"""Several engines in worker processes behind one interface: each request goes to the least loaded engine.

A later turn of an episode goes to the engine of the turn before, whose cache holds its context, unless that engine has
much more to do than another.

In asynchronous (off-policy) training, responses are in flight when a weight sync starts; `OnWeightSync` selects what
happens to them. No engine changes its weights within a request, so the weight version of every token is known.

A lost engine (its process died or hangs, or vLLM failed) is replaced by `replace_lost`; the new engine gets requests
once it has weights. The lost engine's requests are retried with the same seed.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from typing import Any

from verl.errors import EngineError, EngineLostError, LostRequestError
from verl.rollout.engine import Sampling, each_of
from verl.rollout.stopping import Decode, tokens_to_stop
from verl.single_controller.group import Method, WorkerGroup, WorkerLostError
from verl.transfer.bucket import BucketLayout
from verl.transfer.stream import Address
from verl.types import Completion, FinishReason

_SEEDS_BETWEEN_PIECES = 1_000_033  # seed offset: a continued response uses other random numbers than its first part
_INTERRUPT_AGAIN_S = 0.2
_ATTEMPTS = 2  # attempts per request
_TIMES, _MORE = 1.5, 4  # the engine of an episode may have so many times the fewest requests in flight, and so many
_MOST_KEPT = 100_000  # episodes of which the engine is known; weight syncs, which empty the caches, forget them, too
_MAX_REMAKES = 3  # restarts of one engine between two weight syncs

_log = logging.getLogger(__name__)


class OnWeightSync(StrEnum):
    """What happens at a weight sync to responses in flight."""

    CONTINUE = "continue"  # partial rollout: the new weights continue the response
    FINISH = "finish"  # the weight sync waits until the old weights have finished the response
    ABORT_AND_RETRY = "abort_and_retry"  # the new weights restart the response; earlier turns of the episode stay


class _ReplacedError(Exception):
    """The engine was lost and is being replaced."""


@dataclass(eq=False)
class EngineSubset:
    """Some engines of a pool, as a weight sync sees them. Engines lost meanwhile are skipped."""

    pool: EnginePool
    ranks: Sequence[int]

    async def connect(self, addresses: Mapping[int, Address]) -> dict[int, list[bytes]]:
        sources = self.pool._sources
        calls = {rank: ({place: addresses[place] for place in sources[rank]},) for rank in self.ranks}
        keys: dict[int, list[bytes]] = defaultdict(list)
        for engine in await self.pool._each(calls, Method("connect")):
            for place, its_own in engine.items():
                keys[place] += its_own
        return keys

    async def begin_weights(self, layouts: Sequence[BucketLayout]) -> None:
        await self.pool._on(self.ranks, Method("begin_weights"), layouts)

    async def load_weights(self) -> None:
        await self.pool._on(self.ranks, Method("load_weights"))

    async def end_weights(self, version: int) -> None:
        pool = self.pool
        await pool._on(self.ranks, Method("end_weights"), version)
        if version != pool.version:
            pool._in_a_row = [0] * len(pool._in_a_row)
            pool._rank_of.clear()
        pool.version = version
        pool._synced |= set(self.ranks) - pool._lost.keys()
        if not pool._paused:
            pool._admit()

    async def probe(self, prompt_ids: Sequence[int], sampling: Sampling) -> list[tuple[Completion, ...]]:
        return await self.pool._on(self.ranks, Method("generate"), prompt_ids, sampling)


class EnginePool(EngineSubset):
    """A RolloutEngine over a worker group whose workers are engines."""

    def __init__(
        self,
        workers: WorkerGroup,
        sources: Sequence[Sequence[int]],
        on_weight_sync: OnWeightSync | None = None,
        decode: Decode | None = None,
        remake: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        """sources: per engine, the trainer ranks that send to it
        on_weight_sync: None if no response is ever in flight during a weight sync
        decode: tokens to text; needed for stop strings of responses that continue with new weights
        remake: restarts a lost engine; None: losing an engine is an error
        """
        super().__init__(self, range(workers.size))
        self._workers = workers
        self._sources = sources
        self._on_weight_sync = on_weight_sync
        self._decode = decode
        self._remake = remake
        self._in_flight = [0] * workers.size
        self._rank_of: dict[int, int] = {}  # engine of an episode's latest request
        self._num_written = 0  # tokens of responses, or pieces of them, that engines have returned
        self._open = asyncio.Event()  # cleared during a weight sync
        self._open.set()
        self._paused = False  # requests stay blocked after the weight sync
        self._landed = asyncio.Event()  # a request has finished
        self.version: int | None = None  # weight version of the last weight sync
        self.restore: Callable[[], Awaitable[None]] | None = None  # calls `replace_lost`, syncs weights when possible
        self.num_remade = self.num_retried = 0  # engines, requests; since the last call of `metrics`
        self._ready = set(range(workers.size))  # engines that accept requests
        self._usable = asyncio.Event()  # set if an engine is ready, or if none ever will be
        self._usable.set()
        self._synced: set[int] = set()  # engines that have all new weights
        self._lost: dict[int, Exception] = {}  # cause, by engine
        self._losses = [0] * workers.size
        self._in_a_row = [0] * workers.size  # restarts of each engine since the last weight sync
        self._restoring: asyncio.Task[None] | None = None
        self._failure: Exception | None = None  # why lost engines cannot be replaced

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
        if self._on_weight_sync is None:
            return await self._request(prompt_ids, sampling)
        return tuple(await asyncio.gather(*(self._whole(prompt_ids, one) for one in each_of(sampling))))

    async def _whole(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """One completion; every weight sync may split it into another piece."""
        pieces: list[Completion] = []
        while True:
            written = tuple(chain.from_iterable(piece.token_ids for piece in pieces))
            (piece,) = await self._request((*prompt_ids, *written), _rest(sampling, pieces))
            if written:
                piece = self._stopped(written, piece, sampling.stop_strings)
            if piece.finish_reason is not FinishReason.ABORT or self._open.is_set():
                return joined([*pieces, piece])
            if self._on_weight_sync is OnWeightSync.CONTINUE and piece.token_ids:
                pieces.append(piece)

    def _stopped(self, written: Sequence[int], piece: Completion, stops: Sequence[str]) -> Completion:
        """Truncate at a stop string that spans two pieces: an engine searches only its own output."""
        if not stops:
            return piece
        assert self._decode is not None, "stop strings of responses in pieces need `decode`"
        end = tokens_to_stop(self._decode, written, piece.token_ids, stops)
        if end is None:
            return piece
        token_ids, logprobs = piece.token_ids[:end], piece.logprobs[:end]
        return replace(piece, token_ids=token_ids, logprobs=logprobs, finish_reason=FinishReason.STOP)

    async def _request(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
        for _ in range(_ATTEMPTS):
            rank = await self._choose(sampling.episode)
            self._in_flight[rank] += sampling.n
            try:
                completions = tuple(await self._submit(rank, Method("generate"), prompt_ids, sampling))
                self._num_written += sum(len(each.token_ids) for each in completions)
                return completions
            except _ReplacedError as error:
                cause = error.__cause__
                self.num_retried += 1
            finally:
                self._in_flight[rank] -= sampling.n
                self._landed.set()
        raise LostRequestError(f"the engine was lost {_ATTEMPTS} times in a row; last cause: {cause}")

    async def _choose(self, episode: int | None) -> int:
        """Wait for a ready engine and pick the one of the episode, or the least loaded one. Raises the error that
        prevents replacing lost ones."""
        while self._failure is None and not (self._open.is_set() and self._ready):
            await self._open.wait()
            await self._usable.wait()
        if self._failure is not None:
            raise self._failure
        chosen = min(sorted(self._ready), key=self._in_flight.__getitem__)
        if episode is None:
            return chosen
        known = self._rank_of.get(episode)
        if known in self._ready and self._in_flight[known] <= _TIMES * self._in_flight[chosen] + _MORE:
            chosen = known
        if len(self._rank_of) >= _MOST_KEPT:
            self._rank_of.clear()
        self._rank_of[episode] = chosen
        return chosen

    async def _submit(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """An engine's result. Raises _ReplacedError if the engine is lost and will be replaced."""
        losses = self._losses[rank]
        try:
            return await self._workers.submit(rank, function, *args)
        except (WorkerLostError, EngineLostError) as error:
            if self._remake is None:
                raise
            if self._losses[rank] == losses:  # the first caller to notice
                self._lose(rank, error)
            raise _ReplacedError from error

    def _lose(self, rank: int, cause: Exception) -> None:
        first, *others = str(cause).splitlines() or [repr(cause)]
        last = f" ({others[-1].strip()})" if others else ""  # the last line of a log is enough for the console
        _log.warning("%s%s\nStarting a new engine; its requests will be retried", first, last)
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
        except Exception as error:  # noqa: BLE001  raised in all later requests
            self._failure = error
            self._usable.set()

    @property
    def lost(self) -> Sequence[int]:
        return sorted(self._lost)

    async def replace_lost(self) -> EngineSubset | None:
        """Restart lost engines and return them. They accept requests after their first weight sync."""
        ranks = self.lost
        await asyncio.gather(*(self._make(rank) for rank in ranks))
        return EngineSubset(self, ranks) if ranks else None

    async def _make(self, rank: int) -> None:
        assert self._remake is not None
        while rank in self._lost:
            if self._in_a_row[rank] == _MAX_REMAKES:
                cause, times = self._lost[rank], _MAX_REMAKES + 1
                raise EngineError(f"an engine was lost {times} times within one step; last cause: {cause}") from cause
            self._in_a_row[rank] += 1
            self.num_remade += 1
            try:
                await self._remake(rank)
            except (WorkerLostError, EngineLostError) as error:
                self._lost[rank] = error
            else:
                del self._lost[rank]

    async def tokens_written(self) -> int:
        in_progress: list[int] = await self._on(self.ranks, Method("tokens_written"))
        return self._num_written + sum(in_progress)

    async def metrics(self) -> dict[str, float]:
        remade, retried, self.num_remade, self.num_retried = self.num_remade, self.num_retried, 0, 0
        counts = Counter({"rollout/engine_restarts": float(remade), "rollout/requests_retried": float(retried)})
        for each in await self._on(self.ranks, Method("metrics")):
            counts.update(each)
        return dict(counts)

    async def interrupt(self) -> None:
        await self._on(self.ranks, Method("interrupt"))

    async def begin_weights(self, layouts: Sequence[BucketLayout]) -> None:
        """Wait until no response is in flight, then start the weight sync; new requests wait until its end."""
        self._open.clear()
        try:
            while any(self._in_flight):
                self._landed.clear()
                if self._on_weight_sync is not OnWeightSync.FINISH:
                    await self.interrupt()  # repeatedly, because a request may still be on its way to an engine
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._landed.wait(), _INTERRUPT_AGAIN_S)
            await super().begin_weights(layouts)
        except BaseException:
            self._open.set()  # requests run on the old weights, or raise if there are none
            raise

    def _admit(self) -> None:
        self._ready |= self._synced - self._lost.keys()
        self._synced.clear()
        self._open.set()
        if self._ready:
            self._usable.set()

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._paused = True
        try:
            yield
        finally:
            self._paused = False
            self._admit()

    async def sleep(self) -> None:
        await self._on(self.ranks, Method("sleep"))

    async def close(self) -> None:
        await self._on(self.ranks, Method("close"))

    async def _on(self, ranks: Iterable[int], function: Callable[..., Awaitable[Any]], *args: Any) -> list[Any]:
        """Call a function on these engines; results of those that are not lost."""
        return await self._each(dict.fromkeys(ranks, args), function)

    async def _each(self, calls: dict[int, tuple[Any, ...]], function: Callable[..., Awaitable[Any]]) -> list[Any]:
        """Like `_on`, with separate arguments per engine."""

        async def answer(rank: int, args: tuple[Any, ...]) -> list[Any]:
            try:
                return [await self._submit(rank, function, *args)]
            except _ReplacedError:
                return []

        asked = (answer(rank, args) for rank, args in calls.items() if rank not in self._lost)
        return list(chain.from_iterable(await asyncio.gather(*asked)))


def _rest(sampling: Sampling, pieces: Sequence[Completion]) -> Sampling:
    if not pieces:
        return sampling
    seed = None if sampling.seed is None else sampling.seed + len(pieces) * _SEEDS_BETWEEN_PIECES
    num_written = sum(len(piece.token_ids) for piece in pieces)
    return replace(sampling, max_tokens=sampling.max_tokens - num_written, seed=seed)


def joined(pieces: Sequence[Completion]) -> Completion:
    *_, last = pieces
    if len(pieces) == 1:
        return last
    return Completion(
        array("i", chain.from_iterable(piece.token_ids for piece in pieces)),
        array("f", chain.from_iterable(piece.logprobs for piece in pieces)),
        last.finish_reason,
        last.weight_version,
        tuple(chain.from_iterable(piece.versions for piece in pieces)),
    )
