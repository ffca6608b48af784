"""An engine that says what it is told to: for tests, and to try everything else before a real one is started."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from verl.rollout.engine import Sampling
from verl.types import Completion, FinishReason

if TYPE_CHECKING:
    from verl.transfer.bucket import BucketHandle, BucketLayout


class ScriptedEngine:
    """Answers every prompt by `script(prompt_ids, number of the completion) -> token ids`, each at log-prob 0."""

    def __init__(self, script: Callable[[Sequence[int], int], Sequence[int]]) -> None:
        self._script = script
        self._version = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
        """The script's tokens, cut at `max_tokens`."""
        return tuple(self._complete(prompt_ids, sampling, number) for number in range(sampling.n))

    def _complete(self, prompt_ids: Sequence[int], sampling: Sampling, number: int) -> Completion:
        said = tuple(self._script(prompt_ids, number))
        ids = said[: sampling.max_tokens]
        reason = FinishReason.LENGTH if len(ids) < len(said) else FinishReason.STOP
        return Completion(ids, (0.0,) * len(ids), reason, self._version)

    async def interrupt(self) -> None:
        """Nothing takes any time."""

    async def begin_weights(self, layouts: Sequence[BucketLayout]) -> None:
        """Needs no weights."""

    async def load_bucket(self, layout: BucketLayout, *offers: BucketHandle) -> None:
        """Needs no weights."""

    async def end_weights(self, version: int) -> None:
        """Takes note of the version alone."""
        self._version = version

    async def sleep(self) -> None:
        """Nothing to give up."""

    async def close(self) -> None:
        """Nothing to end."""
