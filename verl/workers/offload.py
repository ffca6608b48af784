"""Offload of parameters and optimizer state to host memory while the device is needed for something else.

Never run on a GPU so far. On a CPU nothing moves.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Offload:
    """Tensors that are offloaded to host memory between uses."""

    params: bool = False
    optimizer: bool = False


NO_OFFLOAD = Offload()


class Offloadable:
    """A group of tensors that is on the device or in host memory."""

    def __init__(self, move: Callable[[torch.device], None], device: torch.device, wanted: bool) -> None:
        """wanted: whether to offload; ignored on CPU"""
        self._move = move
        self._device = device
        self._enabled = wanted and device != _HOST
        self._offloaded = False

    def load(self) -> None:
        """Move to the device, unless already there."""
        if self._offloaded:
            self._move(self._device)
            self._offloaded = False

    def offload(self) -> None:
        """Move to host memory, if enabled."""
        if self._enabled and not self._offloaded:
            self._move(_HOST)
            self._offloaded = True
