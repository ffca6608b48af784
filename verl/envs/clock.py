"""The seconds of an environment. What its calls wait for a free place is the load's doing, and is not among them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar


class EnvTimer:
    """Stands still while calls of an environment wait for a place and none of them works."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._timeout = asyncio.timeout(None)
        self._over = False
        self._waiting = self._working = 0  # calls
        self._counted_s = 0.0  # until it last stood still
        self._since: float | None = None  # when it went on; None while it stands still

    @property
    def seconds(self) -> float:
        """Those that were counted."""
        return self._counted_s + (0.0 if self._since is None else asyncio.get_running_loop().time() - self._since)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Raises TimeoutError past the limit, as asyncio.timeout does.

        It hears of the calls that go through `acquire_slot` inside, also in tasks that are started there.
        """
        token = _CURRENT.set(self)
        try:
            async with self._timeout:
                self.update()
                yield
        finally:
            self._over = True
            _CURRENT.reset(token)

    def update(self, waiting: int = 0, working: int = 0) -> None:
        """So many more calls wait, or work."""
        self._waiting += waiting
        self._working += working
        still = self._waiting > 0 and self._working == 0
        now = asyncio.get_running_loop().time()
        self._counted_s, self._since = self.seconds, None if still else now
        if not (self._over or self._timeout.expired()):
            self._timeout.reschedule(None if still else now + self._limit_s - self._counted_s)


_CURRENT: ContextVar[EnvTimer | None] = ContextVar("clock of the environment", default=None)


@asynccontextmanager
async def paused() -> AsyncIterator[None]:
    """Wait inside for what the policy is not to blame for: a free place, a simulated user's words."""
    clock = _CURRENT.get()
    if clock is None:  # outside of episodes
        yield
        return
    clock.update(waiting=1)
    try:
        yield
    finally:
        clock.update(waiting=-1)


@asynccontextmanager
async def acquire_slot(places: asyncio.Semaphore) -> AsyncIterator[None]:
    """Wait for one of the places, and work there."""
    clock = _CURRENT.get()
    if clock is None:  # a call outside of episodes
        async with places:
            yield
        return
    async with paused():
        await places.acquire()
    clock.update(working=1)
    try:
        yield
    finally:
        clock.update(working=-1)
        places.release()
