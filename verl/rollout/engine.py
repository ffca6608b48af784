"""What generates: tokens in, tokens out. The rest of the house sees this protocol and nothing else of an engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from verl.types import Completion

if TYPE_CHECKING:  # engines of other kinds need no torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample one completion."""

    max_tokens: int
    temperature: float = 1.0  # 0: greedy
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None  # engines that can make one request repeatable by itself do


class RolloutEngine(Protocol):
    """Generates completions, many at a time, with weights that are replaced between them."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """One completion; concurrent calls run as one batch. Its log-probs are those at the sampling temperature."""

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take new weights by name; completions carry `version` from now on."""
