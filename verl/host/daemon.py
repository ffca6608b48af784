"""Runs functions in dedicated daemon threads, and coroutines from synchronous code.

The threads of `asyncio.to_thread` belong to a pool that event loop and process join at exit, however long it takes.
Daemon threads are not joined: a call that hangs, or waits for busy workers, does not block the exit.
"""

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, Generic, ParamSpec, TypeVar

from verl.host.threads import threads_of

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Daemon(Generic[_T]):
    """A function call running in its own daemon thread. Create and await it in the same event loop."""

    def __init__(self, name: str, call: Callable[[], _T]) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[tuple[list[_T], BaseException | None]] = self._loop.create_future()
        self._call = call
        run = contextvars.copy_context().run
        self.thread = threads_of(self._loop).start(name, lambda: run(self._work))

    async def result(self) -> _T:
        """The function's result or exception. Canceling the caller leaves the thread running."""
        values, error = await self._ended
        if error is not None:
            raise error
        return values[0]

    def _work(self) -> None:
        try:
            end: tuple[list[_T], BaseException | None] = [self._call()], None
        except BaseException as raised:  # noqa: BLE001  raised again in `result`
            end = [], raised
        with suppress(RuntimeError):  # the loop may be closed by now
            self._loop.call_soon_threadsafe(self._settle, end)

    def _settle(self, end: tuple[list[_T], BaseException | None]) -> None:
        if not self._ended.done():
            self._ended.set_result(end)


async def run_in_daemon_thread(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Like `asyncio.to_thread`, but in a daemon thread that is abandoned if this is canceled."""
    return await Daemon(getattr(function, "__name__", "work"), lambda: function(*args, **kwargs)).result()


def run_async(main: Coroutine[Any, Any, _T], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None) -> _T:
    """Like `asyncio.run`, but also works inside a running event loop (e.g. a notebook), in a separate thread.

    Blocks until the end in both cases. An interrupt cancels `main` and is raised after it has ended; it is not reported
    again as an error of the interrupted task.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(main, loop_factory)
    return _run_in_thread(main, loop_factory)


def _run(main: Coroutine[Any, Any, _T], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None) -> _T:
    def report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), KeyboardInterrupt):
            loop.default_exception_handler(context)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        loop = runner.get_loop()
        loop.set_exception_handler(report)
        try:
            return runner.run(main)
        except KeyboardInterrupt as interrupt:
            _end_tasks(loop, interrupt)
            raise


def _end_tasks(loop: asyncio.AbstractEventLoop, interrupt: KeyboardInterrupt) -> None:
    """Cancel all tasks and let them clean up. Raises a second interrupt.

    asyncio itself stops at the first of the tasks that await each other: each raises the interrupt out of the loop.
    """
    while tasks := asyncio.all_tasks(loop):
        for task in tasks:
            if not task.cancelling():  # already cleaning up
                task.cancel()
        try:
            loop.run_until_complete(asyncio.wait(tasks))
        except KeyboardInterrupt as again:
            if again is not interrupt:
                raise


def _run_in_thread(main: Coroutine[Any, Any, _T], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None) -> _T:
    started: Future[Callable[[], object]] = Future()  # a function that cancels `main`
    ended: Future[_T] = Future()

    async def cancellable() -> _T:
        task = asyncio.current_task()
        assert task is not None
        loop, cancel = asyncio.get_running_loop(), task.cancel
        started.set_result(lambda: loop.call_soon_threadsafe(cancel))
        return await main

    def work() -> None:
        try:
            ended.set_result(_run(cancellable(), loop_factory))
        except BaseException as error:  # noqa: BLE001  raised again in the caller
            started.cancel()  # if `main` never started
            ended.set_exception(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,), name="event loop", daemon=True)
    thread.start()
    try:
        return ended.result()
    except KeyboardInterrupt:
        with suppress(RuntimeError, CancelledError):  # it has already ended, or never started
            started.result()()
        thread.join()
        raise
