"""Threads and the queues between them, behind an interface: a simulation runs them one at a time, in virtual time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable


class Queue(Protocol):
    """First in, first out."""

    def put(self, item: Any) -> None:
        """Never waits."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Wait for an item. Raises queue.Empty after `timeout` seconds."""

    def empty(self) -> bool:
        """Whether nothing is in it."""


class Threads(Protocol):
    """Starts threads that nothing waits for at the end of the process."""

    def start(self, name: str, work: Callable[[], object]) -> threading.Thread:
        """A daemon thread that runs `work`."""

    def queue(self) -> Queue:
        """For items between these threads and others."""


class SystemThreads(Threads):
    """The threads of the operating system."""

    def start(self, name: str, work: Callable[[], object]) -> threading.Thread:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        return thread

    def queue(self) -> Queue:
        return queue.SimpleQueue()


SYSTEM = SystemThreads()


@runtime_checkable
class HasThreads(Protocol):
    """An event loop with threads of its own."""

    threads: Threads


def threads_of(loop: object) -> Threads:
    return loop.threads if isinstance(loop, HasThreads) else SYSTEM
