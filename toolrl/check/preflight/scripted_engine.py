"""An engine that returns scripted responses: for tests, and for dry runs before a real engine is started."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from verl.rollout.engine import Sampling, SingleEngine
from verl.types import Completion, FinishReason

if TYPE_CHECKING:
    from verl.transfer.bucket import BucketHandle, BucketLayout


class ScriptedEngine(SingleEngine):
    """Answers every prompt with `script(prompt_ids, index of the completion) -> token ids`, each at log-prob 0."""

    def __init__(self, script: Callable[[Sequence[int], int], Sequence[int]]) -> None:
        self._script = script
        self._version = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
        """The script's tokens, truncated at `max_tokens`."""
        return tuple(self._complete(prompt_ids, sampling, number) for number in range(sampling.n))

    def _complete(self, prompt_ids: Sequence[int], sampling: Sampling, number: int) -> Completion:
        scripted = tuple(self._script(prompt_ids, number))
        ids = scripted[: sampling.max_tokens]
        reason = FinishReason.LENGTH if len(ids) < len(scripted) else FinishReason.STOP
        return Completion(ids, (0.0,) * len(ids), reason, self._version)

    async def interrupt(self) -> None:
        """No-op: generation is instantaneous."""

    async def begin_weights(self, layouts: Sequence[BucketLayout]) -> None:
        """No-op: there are no weights."""

    async def load_bucket(self, layout: BucketLayout, *handles: BucketHandle) -> None:
        """No-op: there are no weights."""

    async def end_weights(self, version: int) -> None:
        self._version = version

    async def sleep(self) -> None:
        """No-op: there is no device memory."""

    async def close(self) -> None:
        """No-op: there are no processes."""
