"""What generates: tokens in, tokens out. The rest of the house sees this protocol and nothing else of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from verl.types import Completion

if TYPE_CHECKING:  # engines of other kinds need no torch
    from verl.transfer.bucket import BucketHandle, BucketLayout


TRUNCATION = ("top_p", "top_k", "min_p", "repetition_penalty")  # what makes it another distribution than the model's


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample the completions of one prompt."""

    max_tokens: int
    temperature: float = 1.0  # 0: greedy
    n: int = 1  # completions, independent of one another
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int | None = None  # of the first completion, counting up; engines that can repeat a request by itself heed it
    top_p: float = 1.0  # the fewest likeliest tokens that are as probable together
    top_k: int = -1  # the likeliest tokens; -1: all
    min_p: float = 0.0  # tokens at least as probable as this share of the likeliest one
    repetition_penalty: float = 1.0  # divides the logits of tokens of prompt and completion so far, if above 0

    def whole(self) -> Sampling:
        """The same from the model's own distribution: nothing is cut off or penalised."""
        return replace(self, top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0)


def each_of(sampling: Sampling) -> list[Sampling]:
    """The request's completions one by one; their seeds count up."""
    first = sampling.seed
    seeds = [None if first is None else first + number for number in range(sampling.n)]
    return [replace(sampling, n=1, seed=seed) for seed in seeds]


class RolloutEngine(Protocol):
    """Generates completions, many at a time, with weights that are replaced between them."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
        """`sampling.n` completions; concurrent calls run together.

        Log-probs are of the distribution that is sampled: at its temperature, of what is left of it.
        """

    async def interrupt(self) -> None:
        """Break off what is being generated: it comes back as far as it is, with FinishReason.ABORT."""

    async def begin_weights(self, layouts: Sequence[BucketLayout]) -> None:
        """Get ready for all weights in buckets. Raises EngineError, and goes on with the old ones, unless they are just
        those that its model needs. Requests wait until `end_weights`."""

    async def load_bucket(self, layout: BucketLayout, *offers: BucketHandle) -> None:
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
