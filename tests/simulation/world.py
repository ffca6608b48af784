"""Virtual time: events in one heap, an event loop that waits in it, and threads of which one runs at a time.

Time passes only when the event loop and all threads wait, and jumps to the next event. So everything that happens is a
function of the seed, and a run of the seed repeats bit for bit.
"""

from __future__ import annotations

import asyncio
import heapq
import queue
import random
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, ClassVar, NoReturn

from verl.host.threads import Queue, Threads

FREE_TURNS, TURN_S = 1_000, 1e-6  # of the event loop, between two events; what each further one takes
MAX_TURNS = 20_000


class ControllerKilledError(BaseException):
    """SIGKILL of the controller: nothing of it runs any more."""


class NoProgressError(BaseException):
    """Far more has happened, or far more time has passed, than the run may need. No error that the run may handle."""


class World:
    """The clock and the events to come. `trace` lists what happened: virtual seconds and a text."""

    def __init__(self, seed: int, limit_s: float, max_events: int) -> None:
        """limit_s, max_events: of a start of the command"""
        self.random = random.Random(seed)
        self.now = 0.0
        self.trace: list[tuple[float, str]] = []
        self.killed = False  # the controller
        self._limit_s, self._max_events = limit_s, max_events
        self._until_s, self._events_left = limit_s, max_events
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._number = 0
        self._runnable: list[_Thread] = []
        self.threads: list[_Thread] = []  # that have not ended

    def note(self, text: str) -> None:
        self.trace.append((round(self.now, 6), text))

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        """The action is run by the main thread, whatever waits there, so it may raise what a signal would."""
        self._number += 1
        heapq.heappush(self._events, (self.now + seconds, self._number, action))

    def delay(self, low: float, high: float) -> float:
        return self.random.uniform(low, high)

    def advance(self, until: float) -> None:
        """Run the next event, or all threads that can run; else let the time pass up to `until`."""
        if self.killed:
            raise ControllerKilledError
        if self._runnable:
            self._run_threads()
            if self.killed:
                raise ControllerKilledError
            return
        if not self._events or self._events[0][0] > until:
            if until == float("inf"):
                self.give_up("nothing will ever happen")
            self._pass_to(until)
            return
        when, _, action = heapq.heappop(self._events)
        self._pass_to(when)
        action()

    def _pass_to(self, when: float) -> None:
        self.now = max(self.now, when)
        self._events_left -= 1
        if self.now > self._until_s or self._events_left < 0:
            self.give_up(f"no end after {self.now:.0f} s")

    def give_up(self, problem: str) -> NoReturn:
        self.killed = True
        raise NoProgressError(f"{problem}; the last of {len(self.trace)} events: {self.trace[-3:]}")

    def wait(self, done: Callable[[], bool], until: float = float("inf")) -> bool:
        """Block the calling thread, the main one or one of `threads`. Returns `done()` at the latest at `until`."""
        carrier = threading.current_thread()
        mine = carrier.carried if isinstance(carrier, _Carrier) else None
        if until != float("inf"):
            self.after(max(0.0, until - self.now), lambda: None)
        while not done() and self.now < until:
            if mine is not None:
                mine.waits_for = lambda: done() or self.now >= until
                mine.hand_over()
            else:
                self.advance(until)
                self._wake()
        return done()

    def _wake(self) -> None:
        for thread in self.threads:
            if thread.waits_for is not None and thread.waits_for():
                thread.waits_for = None
                self._runnable.append(thread)

    def start(self, thread: _Thread) -> None:
        self.threads.append(thread)
        self._runnable.append(thread)

    def _run_threads(self) -> None:
        self.random.shuffle(self._runnable)
        while self._runnable:
            self._runnable.pop().resume()
        self.threads = [thread for thread in self.threads if not thread.ended]

    def jump(self, seconds: float) -> None:
        """Time passes in which the controller does not run. Everything else does: its events are late for it."""
        self.now += seconds

    def restart(self) -> None:
        """The command is started again; nothing of before is left."""
        self.killed = False
        self._events, self._runnable, self.threads = [], [], []
        self._until_s, self._events_left = self.now + self._limit_s, self._max_events

    def kill(self) -> None:
        """The controller ends here. To be called by an event."""
        self.killed = True
        raise ControllerKilledError

    def end(self) -> None:
        """End the threads that a killed controller has left."""
        for thread in self.threads:
            while not thread.ended:
                thread.resume()
        self.threads = []


class _Thread(threading.Thread):
    """A thread of the controller, carried by one of the operating system: it runs between `resume` and `hand_over`."""

    def __init__(self, world: World, name: str, work: Callable[[], object]) -> None:
        super().__init__(name=name, daemon=True)  # never started itself
        self.world, self.ended = world, False
        self.waits_for: Callable[[], bool] | None = None
        self._work = work
        self._carrier: _Carrier | None = None

    def resume(self) -> None:
        """Called by the main thread, which goes on when this thread waits or has ended."""
        if self._carrier is None:
            self._carrier = _Carrier.idle.pop() if _Carrier.idle else _Carrier()
            self._carrier.carried = self
        carrier = self._carrier
        carrier.mine.release()
        carrier.main.acquire()
        if self.ended:
            _Carrier.idle.append(carrier)

    def carry(self) -> None:
        try:
            if not self.world.killed:
                self._work()
        except ControllerKilledError:
            pass
        finally:
            self.ended = True

    def hand_over(self) -> None:
        assert self._carrier is not None
        self._carrier.main.release()
        self._carrier.mine.acquire()
        if self.world.killed:
            raise ControllerKilledError

    def is_alive(self) -> bool:
        return not self.ended

    def join(self, timeout: float | None = None) -> None:
        if not self.world.killed:
            self.world.wait(lambda: self.ended, float("inf") if timeout is None else self.world.now + timeout)


class _Carrier(threading.Thread):
    """A thread of the operating system; starting one for every call would take most of the time."""

    idle: ClassVar[list[_Carrier]] = []

    def __init__(self) -> None:
        super().__init__(name="carrier", daemon=True)
        self.mine, self.main = threading.Lock(), threading.Lock()  # held but for a moment, to let the other side go on
        self.mine.acquire()
        self.main.acquire()
        self.carried: _Thread | None = None
        self.start()

    def run(self) -> None:
        while True:
            self.mine.acquire()
            assert self.carried is not None
            self.carried.carry()
            self.main.release()


class _Queue(Queue):
    def __init__(self, world: World) -> None:
        self._world, self._items = world, deque[Any]()

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        until = float("inf") if timeout is None else self._world.now + timeout
        if not self._world.wait(lambda: bool(self._items), until):
            raise queue.Empty
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items


class WorldThreads(Threads):
    def __init__(self, world: World) -> None:
        self._world = world

    def start(self, name: str, work: Callable[[], object]) -> threading.Thread:
        thread = _Thread(self._world, name, work)
        self._world.start(thread)
        return thread

    def queue(self) -> Queue:
        return _Queue(self._world)


class _Task(asyncio.Task[Any]):
    """With a number for its hash: asyncio cancels the tasks of a set, in the order of their hashes."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class WorldLoop(asyncio.BaseEventLoop):
    """An event loop that waits in a world. Its threads are the world's."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world, self.threads = world, WorldThreads(world)
        self._selector = self  # of which BaseEventLoop needs `select`
        self._num_tasks = 0
        self._turns = 0  # since an event
        self.set_task_factory(self._make_task)

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], context: Context | None = None
    ) -> asyncio.Task[Any]:
        task = _Task(work, loop=loop, context=context)
        self._num_tasks += 1
        task.number = self._num_tasks
        return task

    def time(self) -> float:
        return self._world.now

    def select(self, timeout: float | None) -> list[object]:
        """Let the next event happen. Returns at once if a callback is ready, once all threads have run that can."""
        world = self._world
        world._wake()
        if timeout == 0 and not world._runnable and not world.killed:
            self._turns += 1
            if self._turns > FREE_TURNS:  # a clock moves while code runs: a timer that is due by rounding comes
                world.now += TURN_S
            if self._turns > MAX_TURNS:
                world.give_up("the event loop turns without end")
            return []
        self._turns = 0
        world.advance(float("inf") if timeout is None else world.now + timeout)
        return []

    def _process_events(self, events: list[object]) -> None:
        """There are none: events of the world call `call_soon`."""

    def _write_to_self(self) -> None:
        """The loop looks for callbacks after every event."""
