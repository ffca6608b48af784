"""Times an environment. Time that its calls spend queued for a free slot depends on the load and is not counted."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar


class EnvTimer:
    """A timer with a limit, paused while calls of the environment are queued and none is running."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._timeout = asyncio.timeout(None)
        self._finished = False
        self._waiting = self._working = 0  # number of calls
        self._counted_s = 0.0  # up to the last pause
        self._since: float | None = None  # time of the last resume; None while paused

    @property
    def seconds(self) -> float:
        return self._counted_s + (0.0 if self._since is None else asyncio.get_running_loop().time() - self._since)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Time the block and `acquire_slot` in it, in new tasks too. Raises TimeoutError past the limit."""
        token = _CURRENT.set(self)
        try:
            async with self._timeout:
                self.update()
                yield
        finally:
            self._finished = True
            _CURRENT.reset(token)

    def update(self, waiting: int = 0, working: int = 0) -> None:
        self._waiting += waiting
        self._working += working
        idle = self._waiting > 0 and self._working == 0
        now = asyncio.get_running_loop().time()
        self._counted_s, self._since = self.seconds, None if idle else now
        if not (self._finished or self._timeout.expired()):
            self._timeout.reschedule(None if idle else now + self._limit_s - self._counted_s)


_CURRENT: ContextVar[EnvTimer | None] = ContextVar("environment timer", default=None)


@asynccontextmanager
async def paused() -> AsyncIterator[None]:
    """Do not count the block: it waits for something outside the policy's control (a slot, a simulated user)."""
    timer = _CURRENT.get()
    if timer is None:  # outside of episodes
        yield
        return
    timer.update(waiting=1)
    try:
        yield
    finally:
        timer.update(waiting=-1)


@asynccontextmanager
async def acquire_slot(slots: asyncio.Semaphore) -> AsyncIterator[None]:
    """Hold one of the slots during the block; the wait for it is not counted."""
    timer = _CURRENT.get()
    if timer is None:  # a call outside of episodes
        async with slots:
            yield
        return
    async with paused():
        await slots.acquire()
    timer.update(working=1)
    try:
        yield
    finally:
        timer.update(working=-1)
        slots.release()
