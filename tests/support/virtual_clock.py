"""An event loop whose clock is moved by waits alone: timers go off in their order, however slow the machine is."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class _Skipping(selectors.DefaultSelector):  # type: ignore[valid-type,misc]  # chosen by platform
    """Does not wait, but counts the seconds for which it would have waited."""

    skipped_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(None)
        ready = super().select(0)
        if not ready:
            self.skipped_s += max(timeout, 0.0)
        return ready


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """For tests of timers whose events are all in this loop: other threads and processes have no time to answer."""

    def __init__(self) -> None:
        self._skipping = _Skipping()
        super().__init__(self._skipping)

    def time(self) -> float:
        return self._skipping.skipped_s


def run_at_once(main: Coroutine[Any, Any, _T]) -> _T:
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)
