"""The rollout engine interface: tokens in, tokens out. All other code uses engines through this protocol alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from verl.transfer.stream import Address, Inlet
from verl.types import Completion

if TYPE_CHECKING:  # some engines do not need torch
    from verl.transfer.bucket import BucketHandle, BucketLayout


TRUNCATION = ("top_p", "top_k", "repetition_penalty")  # options that truncate or change the model's distribution


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters for the completions of one prompt."""

    max_tokens: int
    temperature: float = 1.0  # 0: greedy
    n: int = 1  # independent completions
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int | None = None  # seed of the first completion (+1 for each further one); some engines ignore it
    top_p: float = 1.0  # nucleus sampling: smallest set of top tokens with this total probability
    top_k: int = -1  # number of most likely tokens to keep; -1: all
    repetition_penalty: float = 1.0  # divides positive logits of tokens already in the prompt or completion
    episode: int | None = None  # shared by requests that continue each other, so that one engine's cache serves them

    def whole(self) -> Sampling:
        """The same parameters with the model's full distribution: no truncation and no repetition penalty."""
        return replace(self, top_p=1.0, top_k=-1, repetition_penalty=1.0)


def each_of(sampling: Sampling) -> list[Sampling]:
    """The request split into single completions with consecutive seeds."""
    first = sampling.seed
    seeds = [None if first is None else first + number for number in range(sampling.n)]
    return [replace(sampling, n=1, seed=seed) for seed in seeds]


class WeightTarget(Protocol):
    """Engines as a weight sync sees them: one, all of a pool, or some of it."""

    async def connect(self, addresses: Mapping[int, Address]) -> Mapping[int, Sequence[bytes]]:
        """Connect to the trainer ranks with these addresses, after `begin_weights`. Returns by rank the keys by which
        it knows its engines."""

    async def begin_weights(self, layouts: Sequence[BucketLayout]) -> None:
        """Prepare to receive all weights in buckets. Requests wait until `end_weights`. Raises EngineError, and keeps
        the old weights, unless the names match the model's parameters exactly."""

    async def load_weights(self) -> None:
        """Load the buckets that come from the ranks, until one of these hangs up. Raises EngineError on a checksum
        mismatch; the engine is then unusable."""

    async def end_weights(self, version: int) -> None:
        """All buckets were sent: completions carry `version` from now on. Raises EngineError if one has not arrived;
        the engine is then unusable."""

    async def probe(self, prompt_ids: Sequence[int], sampling: Sampling) -> list[tuple[Completion, ...]]:
        """Send the same request to each of these engines; results of those that are not lost."""


class Generator(Protocol):
    """What episodes need of an engine."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
        """Returns `sampling.n` completions; concurrent calls are batched. Log-probs refer to the sampling distribution,
        i.e. after temperature and truncation."""


class RolloutEngine(Generator, WeightTarget, Protocol):
    """Generates many completions concurrently; weights are replaced between them by weight sync."""

    async def interrupt(self) -> None:
        """Abort running requests; they return their partial output with FinishReason.ABORT."""

    def paused(self) -> AbstractContextManager[None]:
        """Hold requests after a weight sync in the block until its end, so that `probe` runs before them."""

    async def replace_lost(self) -> WeightTarget | None:
        """Restart engines whose process was lost, and return those; they need weights. None if none was lost. Raises
        EngineError if an engine keeps being lost."""

    async def tokens_written(self) -> int:
        """Tokens of all responses since the start, those in progress included; a lost engine's are missing."""

    async def metrics(self) -> dict[str, float]:
        """Counts since the last call: lost engines, tokens of drafts."""

    async def sleep(self) -> None:
        """Release device memory for the trainer until new weights arrive. No-op without device memory."""

    async def close(self) -> None:
        """Shut down everything that the engine started."""


class SingleEngine(RolloutEngine, Protocol):
    """An engine that is its own pool: it holds nothing back, and its loss is an error."""

    _inlet: Inlet | None = None  # of the weight sync

    async def load_bucket(self, layout: BucketLayout, *handles: BucketHandle) -> None:
        """Load one bucket of weights from one of the handles, whose memory may be reused afterwards. Raises EngineError
        on a checksum mismatch; the engine is then unusable."""

    async def connect(self, addresses: Mapping[int, Address]) -> Mapping[int, Sequence[bytes]]:
        if self._inlet is not None:  # of a weight sync that was given up
            self._inlet.close()
        self._inlet = await Inlet.connect(addresses.values())
        return {rank: [self._inlet.key] for rank in addresses}

    async def load_weights(self) -> None:
        assert self._inlet is not None, "`connect` comes first"
        with closing(self._inlet) as inlet:
            while (bucket := await inlet.receive()) is not None:
                layout, handles = bucket
                await self.load_bucket(layout, *handles)
                await inlet.loaded()

    @contextmanager
    def paused(self) -> Iterator[None]:
        yield

    async def probe(self, prompt_ids: Sequence[int], sampling: Sampling) -> list[tuple[Completion, ...]]:
        return [await self.generate(prompt_ids, sampling)]

    async def replace_lost(self) -> WeightTarget | None:
        return None

    async def tokens_written(self) -> int:
        return 0

    async def metrics(self) -> dict[str, float]:
        return {}
