"""Slots of a stage, given to the waiting episode with the lowest place, not to the first that came."""

from __future__ import annotations

import asyncio
import heapq
import itertools


class OrderedSlots:
    """A semaphore with an order. Episodes have places in the order of their groups, so that groups complete early."""

    def __init__(self, slots: int) -> None:
        self.free = slots
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap
        self._arrivals = itertools.count()

    async def acquire(self, place: int) -> None:
        if self.free:
            self.free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (place, next(self._arrivals), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the slot came together with the end
                self.release()
            raise

    def release(self) -> None:
        """To the first that waits; those that were canceled are skipped."""
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self.free += 1
