"""Times an environment. Time that its calls spend queued for a free slot depends on the load and is not counted."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar

_TICK_S, _LATE_S = 1.0, 1.0  # between two looks at the clock, and by how much a look may be late and still count


class EnvTimer:
    """A timer with a limit, paused while calls of the environment are queued and none is running.

    It counts in ticks: while this process is stopped, or the machine sleeps, no answer of the environment arrives.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._timeout = asyncio.timeout(None)
        self._finished = False
        self._waiting = self._working = 0  # number of calls
        self._counted_s = 0.0  # up to the last look
        self._since: float | None = None  # time of the last look; None while paused
        self._tick: asyncio.TimerHandle | None = None

    @property
    def seconds(self) -> float:
        if self._since is None:
            return self._counted_s
        return self._counted_s + min(asyncio.get_running_loop().time() - self._since, _TICK_S + _LATE_S)

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
            if self._tick is not None:
                self._tick.cancel()
            _CURRENT.reset(token)

    def update(self, waiting: int = 0, working: int = 0) -> None:
        self._waiting += waiting
        self._working += working
        idle = self._waiting > 0 and self._working == 0
        loop = asyncio.get_running_loop()
        self._counted_s, self._since = self.seconds, None if idle else loop.time()
        if self._tick is not None:
            self._tick.cancel()
        if idle or self._finished or self._timeout.expired():
            return
        if (left_s := self._limit_s - self._counted_s) > 0:
            self._tick = loop.call_later(min(left_s, _TICK_S), self.update)
        else:
            self._timeout.reschedule(loop.time())


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
