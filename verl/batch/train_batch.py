"""The training batch of a step: its input, before any computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl.types import Sample


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """The samples of a step after filters and reward shaping. With settings, weights and step number it determines the
    update.

    baselines: [B] the reward of the greedy response to each sample's prompt, if the algorithm needs one
    kl_coefficient: of the adaptive controller at the start of the step, if there is one
    """

    samples: Sequence[Sample] = ()  # [B]
    baselines: Sequence[float | None] = ()
    kl_coefficient: float | None = None
