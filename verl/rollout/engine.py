"""What generates: tokens in, tokens out. The rest of the house sees this protocol and nothing else of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from verl.types import Completion

if TYPE_CHECKING:  # engines of other kinds need no torch
    from verl.transfer.bucket import Layout, Offer


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample the completions of one prompt."""

    max_tokens: int
    temperature: float = 1.0  # 0: greedy
    n: int = 1  # completions, independent of one another
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int | None = None  # of the first completion, counting up; engines that can repeat a request by itself heed it


def each_of(sampling: Sampling) -> list[Sampling]:
    """The request's completions one by one; their seeds count up."""
    first = sampling.seed
    seeds = [None if first is None else first + number for number in range(sampling.n)]
    return [replace(sampling, n=1, seed=seed) for seed in seeds]


class RolloutEngine(Protocol):
    """Generates completions, many at a time, with weights that are replaced between them."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
        """`sampling.n` completions; concurrent calls run together. Log-probs are those at the sampling temperature."""

    async def interrupt(self) -> None:
        """Break off what is being generated: it comes back as far as it is, with FinishReason.ABORT."""

    async def begin_weights(self, layouts: Sequence[Layout]) -> None:
        """Get ready for all weights in buckets. Raises EngineError, and goes on with the old ones, unless they are just
        those that its model needs. Requests wait until `end_weights`."""

    async def load_bucket(self, layout: Layout, *offers: Offer) -> None:
        """Take the weights of one bucket from one of the offers, whose memory may be used again after that.

        Raises EngineError if they were altered on their way; the engine then is of no more use.
        """

    async def end_weights(self, version: int) -> None:
        """All buckets are there: completions carry `version` from now on."""

    async def sleep(self) -> None:
        """Give up device memory until new weights come, so that the trainer can have it. Nothing where there is none
        to give."""

    async def close(self) -> None:
        """End all that the engine started."""
