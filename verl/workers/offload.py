"""Parts of an engine that wait in host memory while the device is needed for something else.

Never run on a GPU so far. On a CPU nothing moves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Offload:
    """What waits in host memory between its uses."""

    params: bool = False
    optimizer: bool = False


NO_OFFLOAD = Offload()


class Offloadable:
    """One part, and where it is."""

    def __init__(self, move: Callable[[torch.device], None], device: torch.device, wanted: bool) -> None:
        """wanted: it may be put away; ignored where the device's memory is the host's"""
        self._move = move
        self._device = device
        self._may_leave = wanted and device != _HOST
        self._away = False

    def load(self) -> None:
        """To the device, unless it is there."""
        if self._away:
            self._move(self._device)
            self._away = False

    def put_away(self) -> None:
        """To host memory, if it may wait there."""
        if self._may_leave and not self._away:
            self._move(_HOST)
            self._away = True
