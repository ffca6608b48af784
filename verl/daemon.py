"""Functions in daemon threads of their own.

The threads of `asyncio.to_thread` belong to a pool, for which the end of the event loop and of the process wait,
however long it takes. For these nothing waits: what hangs, or waits for workers that compute, holds up nobody who wants
to end.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Daemon(Generic[_T]):
    """A call of a function, running since this was made, and its thread. To be made and awaited in one event loop."""

    def __init__(self, name: str, call: Callable[[], _T]) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[tuple[list[_T], BaseException | None]] = self._loop.create_future()
        self._call = call
        self.thread = threading.Thread(
            target=contextvars.copy_context().run, args=(self._work,), name=name, daemon=True
        )
        self.thread.start()

    async def result(self) -> _T:
        """What the function gave. Raises what it raised; whoever is cancelled here leaves the thread behind."""
        given, error = await self._ended
        if error is not None:
            raise error
        return given[0]

    def _work(self) -> None:
        try:
            end: tuple[list[_T], BaseException | None] = [self._call()], None
        except BaseException as raised:  # noqa: BLE001  it is raised where the call is awaited
            end = [], raised
        with suppress(RuntimeError):  # the loop may have ended meanwhile
            self._loop.call_soon_threadsafe(self._settle, end)

    def _settle(self, end: tuple[list[_T], BaseException | None]) -> None:
        if not self._ended.done():
            self._ended.set_result(end)


async def in_daemon(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """As `asyncio.to_thread`, but for a thread that nothing waits for once this is cancelled."""
    return await Daemon(getattr(function, "__name__", "work"), lambda: function(*args, **kwargs)).result()
