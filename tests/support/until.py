"""Waits of tests for what other processes and threads do."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 60.0


def until(holds: Callable[[], object]) -> None:
    """Return once it holds. The limit is for what never comes: the time it took shows nothing."""
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)
